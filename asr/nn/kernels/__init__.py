"""The ways to compute one LayerNorm-LSTM layer; asr.nn.lstm chooses among them."""
