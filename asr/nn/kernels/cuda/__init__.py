"""The LayerNorm-LSTM for NVIDIA GPUs: Triton between cuBLAS products, replayed as a CUDA graph."""
