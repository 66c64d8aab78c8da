"""Speed of beam search against SpeechBrain's; real-time factor and memory of a trained run.

    uv venv /tmp/peers
    uv pip install --python /tmp/peers/bin/python \
        torch==2.11.0 torchaudio==2.11.0 speechbrain==1.1.2
    .venv/bin/python tests/benchmarks/decoding.py search --peer /tmp/peers/bin/python
    .venv/bin/python tests/benchmarks/decoding.py run runs/demo

`search`: ms per utterance for encoding and beam search, 4 utterances of 6 s (600 frames of 80),
beam 10, every hypothesis forced to 30 of 500 tokens, one thread, random weights. `transformer` has
the shape of transformer.py, `las` that of las.py (`las-ba`: with LayerNorm, which the peer does not
have).

`run`: a trained run on its test split, seconds per second of audio; and the peak memory in MiB of
a process that transcribes one minute of it, against ten minutes.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from interleave import EOS, SOS, speechbrain_front, take_turns

ROOT = Path(__file__).parents[2]
BATCH, FRAMES, MELS, VOCABULARY, TOKENS, BEAM = 4, 600, 80, 500, 30, 10
SIZE, HEADS, FEED_FORWARD, CHANNELS, HIDDEN, EMBEDDING = 144, 4, 576, 32, 256, 128
SHAPES = ("transformer", "las", "las-ba")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("search", "run", "worker", "memory"))
    parser.add_argument("rest", nargs="*", help="run: a run folder")
    parser.add_argument("--peer", help="python of an environment with SpeechBrain")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    args = parser.parse_args()
    if args.what == "worker":
        work(*args.rest)
    elif args.what == "memory":
        memory(*args.rest)
    elif args.what == "run":
        measure_run(Path(args.rest[0]))
    else:
        for shape in args.shape or SHAPES:
            compare(shape, args.peer, args.rounds)


def compare(shape: str, peer: str | None, rounds: int) -> None:
    """One shape, ours and the peer's, interleaved."""
    sides = {"ours": sys.executable} | ({"speechbrain": peer} if peer else {})
    worker = [__file__, "worker"]
    commands = {side: [python, *worker, side, shape] for side, python in sides.items()}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for side, measured in take_turns(commands, rounds).items():
        for actual in measured:
            assert actual["lengths"] == [TOKENS] * BATCH, (side, actual["lengths"])
            times[side].append(1e3 * actual["seconds"] / BATCH)
    middle = {side: statistics.median(own) for side, own in times.items()}
    for side, own in times.items():
        print(f"{shape:12} {side:12} {middle[side]:6.1f} ms an utterance (best {min(own):.1f})")
    if peer:
        print(f"{shape:12} ratio        {middle['ours'] / middle['speechbrain']:6.3f}")


def work(side: str, shape: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    search = {"ours": ours, "speechbrain": speechbrain}[side](shape)
    features = torch.randn(BATCH, FRAMES, MELS)
    for _ in sys.stdin:
        begin = time.perf_counter()
        with torch.no_grad():
            lengths = search(features)
        print(json.dumps({"seconds": time.perf_counter() - begin, "lengths": lengths}), flush=True)


def ours(shape: str) -> Callable:
    import torch

    from asr.config.schema import BeamConfig
    from asr.decoding.beam_search import beam_search

    model = our_transformer() if shape == "transformer" else our_las(shape)
    model.eval()
    frames = torch.full((BATCH,), FRAMES)
    # Every hypothesis has TOKENS tokens, independent of its frames.
    config = BeamConfig(beam=BEAM, length_penalty=0.0, eos_threshold=1e-9, max_ratio=1e-9)

    def search(features: torch.Tensor) -> list[int]:
        results = beam_search(model, model.encode(features, frames), config, max_constant=TOKENS)
        return [len(best.tokens) for best, *_ in results]

    return search


def our_transformer() -> object:
    from asr.config.schema import TransformerConfig
    from asr.models.transformer import Transformer

    shape = {"d_model": SIZE, "heads": HEADS, "feed_forward": FEED_FORWARD}
    layers = {"encoder_layers": 4, "decoder_layers": 2, "subsampling_channels": CHANNELS}
    config = TransformerConfig(
        kind="transformer", **shape, **layers, activation="gelu", ctc_weight=0
    )
    return Transformer(MELS, VOCABULARY, config)


def our_las(shape: str) -> object:
    from asr.config.schema import LasConfig, ListenerConfig, SpellerConfig
    from asr.models.las import LAS

    norm = "ba" if shape == "las-ba" else "none"
    listener = ListenerConfig(layers=2, hidden=HIDDEN, pyramid=(), convolution=4, norm=norm)
    speller = SpellerConfig(hidden=HIDDEN, embedding=EMBEDDING, norm=norm)
    parts = {"listener": listener, "attention_size": HIDDEN, "speller": speller}
    return LAS(MELS, VOCABULARY, LasConfig(kind="las", ctc_weight=0.0, **parts))


def speechbrain(shape: str) -> Callable:
    import torch

    front = speechbrain_front((BATCH, FRAMES, MELS), CHANNELS)
    encode, searcher = (peer_transformer if shape == "transformer" else peer_las)()
    front.eval()
    lengths = torch.ones(BATCH)  # relative lengths

    def search(features: torch.Tensor) -> list[int]:
        states = encode(front(features), lengths)
        return [len(tokens) for tokens in searcher(states, lengths)[0]]

    return search


def peer_search() -> dict:
    share = (TOKENS + 1) / (FRAMES // 4)  # EOS is included
    return {
        "bos_index": SOS,
        "eos_index": EOS,
        "min_decode_ratio": share,
        "max_decode_ratio": share,
        "beam_size": BEAM,
        "using_eos_threshold": False,
        "length_normalization": True,
    }


def peer_transformer() -> tuple[Callable, Callable]:
    import torch
    from speechbrain.decoders.seq2seq import S2STransformerBeamSearcher
    from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
    from speechbrain.nnet.linear import Linear

    model = TransformerASR(
        VOCABULARY,
        MELS // 4 * CHANNELS,
        d_model=SIZE,
        nhead=HEADS,
        num_encoder_layers=4,
        num_decoder_layers=2,
        d_ffn=FEED_FORWARD,
        activation=torch.nn.GELU,
        encoder_module="transformer",
        attention_type="regularMHA",
        normalize_before=True,
        causal=False,
    ).eval()
    output = Linear(n_neurons=VOCABULARY, input_size=SIZE)
    return model.encode, S2STransformerBeamSearcher(modules=[model, output], **peer_search())


def peer_las() -> tuple[Callable, Callable]:
    from speechbrain.decoders.seq2seq import S2SRNNBeamSearcher
    from speechbrain.nnet.embedding import Embedding
    from speechbrain.nnet.linear import Linear
    from speechbrain.nnet.RNN import LSTM, AttentionalRNNDecoder

    listener = LSTM(
        hidden_size=HIDDEN, input_size=MELS // 4 * CHANNELS, num_layers=2, bidirectional=True
    ).eval()
    speller = AttentionalRNNDecoder(
        rnn_type="lstm",
        attn_type="location",
        hidden_size=HIDDEN,
        attn_dim=HIDDEN,
        num_layers=1,
        enc_dim=2 * HIDDEN,
        input_size=EMBEDDING,
        channels=10,
        kernel_size=100,
    ).eval()
    parts = {
        "embedding": Embedding(VOCABULARY, EMBEDDING),
        "decoder": speller,
        "linear": Linear(n_neurons=VOCABULARY, input_size=HIDDEN),
    }
    return lambda states, _: listener(states.flatten(2))[0], S2SRNNBeamSearcher(
        **parts, **peer_search()
    )


def measure_run(run: Path) -> None:
    """Real-time factors, utterance by utterance, and memory of one and of ten minutes."""
    import soundfile
    import torch

    from asr.data.splits import load_split
    from asr.inference.load import load_run_recipe
    from asr.inference.recognition import Recognizer

    torch.set_num_threads(1)
    corpus = load_split(load_run_recipe(run).data, "test")
    some = [corpus[i] for i in range(40)]
    for beam, ctc_weight in ((1, 0.0), (10, 0.0), (10, 0.3)):  # independent of the recipe
        settings = f"decode.beam={beam} decode.ctc_weight={ctc_weight}"
        recognizer = Recognizer.load(run, settings.split())
        recognizer(some[0].audio)  # compiles and warms up
        begin = time.perf_counter()
        for utterance in some:
            recognizer(utterance.audio)
        factor = (time.perf_counter() - begin) / sum(u.seconds for u in some)
        print(f"{settings:40} real-time factor {factor:.4f}")
    longest = max(float(seconds) for seconds in corpus.seconds)
    with tempfile.TemporaryDirectory() as folder:
        peaks = []
        for minutes in (1, 10):
            path = Path(folder) / f"{minutes}.wav"
            rate = recognizer.front_end.sample_rate
            with soundfile.SoundFile(path, "w", rate, 1) as file:
                while file.tell() < 60 * minutes * rate:
                    file.write(soundfile.read(corpus[file.tell() % len(corpus)].audio)[0])
            setting = f"decode.max_segment_seconds={longest}"
            command = [sys.executable, __file__, "memory", str(run), str(path), setting]
            result = json.loads(subprocess.check_output(command).splitlines()[-1])
            peaks.append(result["peak"])
            print(
                f"{minutes:2} min: {result['words']} words, peak {result['peak'] / 2**20:.0f} MiB"
            )
    print(f"memory ratio {peaks[1] / peaks[0]:.3f}")


def memory(run: str, path: str, *settings: str) -> None:
    from asr.inference.recognition import Recognizer

    transcript = Recognizer.load(run, settings)(path)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"words": len(transcript.words), "peak": peak}))


if __name__ == "__main__":
    main()
