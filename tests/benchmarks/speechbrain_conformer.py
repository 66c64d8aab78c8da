"""Word error rate of SpeechBrain's Conformer after a given CPU time, on a manifest of ours.

    uv venv yard
    uv pip install --python yard/bin/python torch==2.11.0 torchaudio==2.11.0 \
        speechbrain==1.1.2 soundfile jiwer sentencepiece
    OMP_NUM_THREADS=1 yard/bin/python tests/benchmarks/speechbrain_conformer.py \
        TRAIN.tsv VALID.tsv --cpu-hours 8 --run FOLDER
    OMP_NUM_THREADS=1 yard/bin/python tests/benchmarks/speechbrain_conformer.py \
        --run FOLDER --evaluate-only TEST.tsv

A yardstick for this project's Conformer on the same data in the same CPU time: 4.88M parameters at
the default sizes. The same command resumes an interrupted run; CPU times add up. Imports,
validation and checkpoints count towards the time, the final decoding does not. Ends with one line
of JSON and a table of WER, also by the manifest's column `source` if it has several.

As in LibriSpeech/ASR/transformer/hparams/conformer_small.yaml of SpeechBrain: front end, Conformer
with relative positions, Transformer decoder, d_model, heads, dropout; features, normalization,
speed perturbation, time and frequency drop, time warping; losses and their weights, Adam, Noam
schedule, gradient clipping, fp32; average of the 10 checkpoints of best validation accuracy; joint
CTC/attention search of its validation (beam 10, CTC weight 0.4), one utterance at a time as in its
test. `greedy` is the same search with beam 1, so it also uses CTC scores.

Different, because there are only hours of speech and of CPU time:
- 8 encoder and 2 decoder layers, feed-forward 576 (there 12, 4 and 1024);
- 100 BPE units of the training transcripts (there 5,000 unigram units);
- batches of 60 s of padded audio (there 900 s), utterances over 20 s skipped;
- 2,000 warm-up steps. The recipe's 25,000 are for 110 epochs of 960 hours; 8 CPU-hours have about
  13,000 steps. The schedule need not know the end; change it with --warmup and --lr;
- no language model (there a Transformer, with beam 66);
- where the time runs out within an epoch, that moment counts as the end of an epoch;
- --precision bf16 (autocast) is 1.5 times as fast as fp32 on a CPU with AVX-512 BF16.
"""

import argparse
import csv
import json
import random
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import jiwer
import sentencepiece
import soundfile
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.freq_domain import SpectrogramDrop, Warping
from speechbrain.augment.time_domain import SpeedPerturb
from speechbrain.decoders import S2STransformerBeamSearcher
from speechbrain.decoders.ctc import ctc_greedy_decode
from speechbrain.decoders.scorer import CTCScorer, ScorerBuilder
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR
from speechbrain.nnet.linear import Linear
from speechbrain.nnet.losses import ctc_loss, kldiv_loss
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.Accuracy import AccuracyStats
from speechbrain.utils.checkpoints import average_state_dicts
from speechbrain.utils.data_utils import batch_pad_right
from torch import Tensor, nn

BLANK, BOS, EOS = 0, 1, 2  # BLANK also pads, and is the tokenizer's unknown unit
SAMPLE_RATE, MELS = 16000, 80
MAX_SECONDS = 20  # longer utterances are skipped in training
VALID_SECONDS = 100  # of padded audio in a batch of the validation
AVERAGED, BEAM, CTC_WEIGHT_DECODE = 10, 10, 0.4
SAVE_EVERY = 1800  # CPU-seconds


def main() -> None:
    options = arguments()
    if options.evaluate_only:
        kept = {name: getattr(options, name) for name in ("run", "threads", "evaluate_only")}
        saved = torch.load(Path(options.run) / "last.pt")["options"]
        options = Namespace(**(saved | kept))
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    run = Run(options)
    if not options.evaluate_only:
        train(run, read_table(options.train), read_table(options.valid))
    report(run, options.evaluate_only or options.valid)


def arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", nargs="?", help="TSV: id speaker audio seconds text [source]")
    parser.add_argument("valid", nargs="?", help="TSV for the choice of checkpoints and the WER")
    parser.add_argument("--run", required=True, help="folder of the checkpoints")
    parser.add_argument("--evaluate-only", metavar="TABLE", help="decode with a finished run")
    parser.add_argument("--cpu-hours", type=float, default=8)
    parser.add_argument("--d-model", type=int, default=144)
    parser.add_argument("--encoder-layers", type=int, default=8)
    parser.add_argument("--decoder-layers", type=int, default=2)
    parser.add_argument("--feed-forward", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=100, help="BPE units")
    parser.add_argument("--ctc-weight", type=float, default=0.3, help="in the training loss")
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3, help="at the end of the warm-up")
    parser.add_argument("--warmup", type=int, default=2000, help="steps")
    parser.add_argument("--batch-seconds", type=float, default=60, help="padded audio per step")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if not options.evaluate_only and not options.valid:
        parser.error("give TRAIN and VALID, or --evaluate-only TABLE")
    return options


class Utterance(NamedTuple):
    audio: Path
    seconds: float
    text: str
    source: str


class Batch(NamedTuple):
    """B utterances, padded. Lengths are fractions of the longest, as SpeechBrain expects them."""

    waves: Tensor  # (B, samples)
    lengths: Tensor  # (B,)
    inputs: Tensor  # (B, U + 1), begins with BOS
    tokens: Tensor  # (B, U), of CTC
    token_lengths: Tensor  # (B,)
    targets: Tensor  # (B, U + 1), ends with EOS
    target_lengths: Tensor  # (B,)


def read_table(path: str) -> list[Utterance]:
    folder = Path(path).parent
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Utterance(folder / row["audio"], float(row["seconds"]), row["text"], row.get("source", ""))
        for row in rows
    ]


def trained_tokenizer(options: Namespace) -> sentencepiece.SentencePieceProcessor:
    """The run's BPE units; trained on the transcripts of the training table at the first start."""
    prefix = Path(options.run) / "bpe"
    model = prefix.with_suffix(".model")
    if not model.exists():
        prefix.parent.mkdir(parents=True, exist_ok=True)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(one.text for one in read_table(options.train)),
            model_prefix=str(prefix),
            model_type="bpe",
            vocab_size=options.vocabulary,
            character_coverage=1.0,
            unk_id=BLANK,
            bos_id=BOS,
            eos_id=EOS,
            minloglevel=1,  # warnings
        )
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def batches_of(
    utterances: list[Utterance], seconds: float, seed: int | None = None
) -> list[list[Utterance]]:
    """Batches of at most `seconds` of padded audio, shortest first, or shuffled by `seed`."""
    chance = random.Random(seed)
    # Shuffled lengths vary by 10 %, so that other utterances meet in each epoch.
    spread = 0.0 if seed is None else 0.1
    batches: list[list[Utterance]] = []
    longest = 0.0
    for one in sorted(utterances, key=lambda x: x.seconds * chance.uniform(1 - spread, 1 + spread)):
        longest = max(longest, one.seconds)
        if batches and longest * (len(batches[-1]) + 1) <= seconds:
            batches[-1].append(one)
        else:
            batches.append([one])
            longest = one.seconds
    if seed is not None:
        chance.shuffle(batches)
    return batches


def read_audio(path: Path) -> Tensor:
    wave, rate = soundfile.read(path, dtype="float32")
    if rate != SAMPLE_RATE or wave.ndim != 1:
        raise SystemExit(f"{path}: needs one channel at {SAMPLE_RATE} Hz")
    return torch.from_numpy(wave)


def collate(
    utterances: list[Utterance],
    tokenizer: sentencepiece.SentencePieceProcessor,
    perturb: Callable[[Tensor], Tensor] | None = None,
) -> Batch:
    waves = [read_audio(one.audio) for one in utterances]
    if perturb:
        waves = [perturb(wave.unsqueeze(0)).squeeze(0) for wave in waves]
    tokens = [torch.tensor(tokenizer.encode(one.text)) for one in utterances]
    begin, end = torch.tensor([BOS]), torch.tensor([EOS])
    inputs, _ = batch_pad_right([torch.cat([begin, one]) for one in tokens])
    targets = batch_pad_right([torch.cat([one, end]) for one in tokens])
    return Batch(*batch_pad_right(waves), inputs, *batch_pad_right(tokens), *targets)


class Conformer(nn.Module):
    """SpeechBrain's modules with the recipe's settings: features, augmentation, network."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        self.bf16 = options.precision == "bf16"
        self.fbank = Fbank(sample_rate=SAMPLE_RATE, n_fft=400, n_mels=MELS)
        self.normalize = InputNormalization(norm_type="global", update_until_epoch=4)
        drop = {"drop_count_low": 4, "drop_count_high": 4, "replace": "mean"}
        time_drop = SpectrogramDrop(drop_length_low=15, drop_length_high=25, **drop)
        freq_drop = SpectrogramDrop(drop_length_low=10, drop_length_high=20, dim=2, **drop)
        steps = [time_drop, freq_drop, Warping()]
        self.augment = Augmenter(min_augmentations=3, max_augmentations=3, augmentations=steps)
        self.front = ConvolutionFrontEnd(
            (8, 10, MELS),
            num_blocks=2,
            num_layers_per_block=1,
            out_channels=(64, 32),
            kernel_sizes=(3, 3),
            strides=(2, 2),
            residuals=(False, False),
        )
        self.transformer = TransformerASR(
            options.vocabulary,
            input_size=MELS // 4 * 32,
            d_model=options.d_model,
            nhead=4,
            num_encoder_layers=options.encoder_layers,
            num_decoder_layers=options.decoder_layers,
            d_ffn=options.feed_forward,
            dropout=0.1,
            activation=nn.GELU,
            encoder_module="conformer",
            attention_type="RelPosMHAXL",
            normalize_before=True,
            causal=False,
        )
        self.ctc = Linear(input_size=options.d_model, n_neurons=options.vocabulary)
        self.output = Linear(input_size=options.d_model, n_neurons=options.vocabulary)

    @torch.no_grad()
    def features(self, batch: Batch, epoch: int) -> Tensor:
        """-> normalized log-mel features (B, T, 80), augmented in training."""
        features = self.normalize(self.fbank(batch.waves), batch.lengths, epoch=epoch)
        return self.augment(features, batch.lengths)[0] if self.training else features

    def forward(self, batch: Batch, epoch: int) -> tuple[Tensor, Tensor]:
        """-> log-probabilities of CTC (B, T / 4, V) and of the decoder (B, U + 1, V)."""
        features = self.features(batch, epoch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            front = self.front(features)
            states, decoded = self.transformer(front, batch.inputs, batch.lengths, pad_idx=BLANK)
            ctc, output = self.ctc(states), self.output(decoded)
        return ctc.float().log_softmax(-1), output.float().log_softmax(-1)

    def encode(self, batch: Batch) -> Tensor:
        """-> states (B, T / 4, d_model), in fp32."""
        return self.transformer.encode(self.front(self.features(batch, epoch=0)), batch.lengths)


@dataclass
class Progress:
    epoch: int = 1
    batch: int = 0  # of the epoch, next to be trained
    step: int = 0
    audio_seconds: float = 0.0  # after speed perturbation
    cpu_seconds: float = 0.0  # of all processes of this run, at the last checkpoint


class Run:
    """Everything a checkpoint holds, and the CPU clock of the run."""

    def __init__(self, options: Namespace) -> None:
        self.options, self.tokenizer = options, trained_tokenizer(options)
        self.folder = Path(options.run)
        self.model = Conformer(options)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, options.lr, betas=(0.9, 0.98), eps=1e-9)
        self.schedule = NoamScheduler(options.lr, options.warmup)
        self.progress = Progress()
        if (self.folder / "last.pt").exists():
            self.resume(torch.load(self.folder / "last.pt"))
        self.cpu_before = self.progress.cpu_seconds

    def resume(self, saved: dict) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.n_steps = saved["progress"]["step"]
        self.model.normalize._load_statistics_dict(saved["normalize"])
        self.progress = Progress(**saved["progress"])
        torch.set_rng_state(saved["random"])

    def save(self) -> None:
        self.progress.cpu_seconds = self.clock()
        state = {
            "options": vars(self.options),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "normalize": self.model.normalize._statistics_dict(),
            "progress": asdict(self.progress),
            "random": torch.get_rng_state(),
        }
        # An interruption while writing must not cost the last checkpoint.
        torch.save(state, self.folder / "new.pt")
        (self.folder / "new.pt").replace(self.folder / "last.pt")

    def clock(self) -> float:
        """CPU-seconds of this run so far."""
        return self.cpu_before + time.process_time()

    def out_of_time(self) -> bool:
        return self.clock() >= 3600 * self.options.cpu_hours


def train(run: Run, training: list[Utterance], validation: list[Utterance]) -> None:
    options, progress = run.options, run.progress
    training = [one for one in training if one.seconds <= MAX_SECONDS]
    perturb = SpeedPerturb(orig_freq=SAMPLE_RATE, speeds=[95, 100, 105])
    saved = run.clock()
    while not run.out_of_time():
        run.model.train()
        seed = 1000 * options.seed + progress.epoch
        batches = batches_of(training, options.batch_seconds, seed)
        while progress.batch < len(batches) and not run.out_of_time():
            train_step(run, collate(batches[progress.batch], run.tokenizer, perturb))
            if run.clock() - saved > SAVE_EVERY:
                run.save()
                saved = run.clock()
        end_epoch(run, validation, whole=progress.batch == len(batches))
        saved = run.clock()


def train_step(run: Run, batch: Batch) -> None:
    options, progress = run.options, run.progress
    ctc, output = run.model(batch, progress.epoch)
    loss_ctc = ctc_loss(ctc, batch.tokens, batch.lengths, batch.token_lengths, BLANK, "batchmean")
    loss_output = kldiv_loss(
        output, batch.targets, batch.target_lengths, options.label_smoothing, reduction="batchmean"
    )
    loss = options.ctc_weight * loss_ctc + (1 - options.ctc_weight) * loss_output
    run.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 5.0)
    run.optimizer.step()
    rate, _ = run.schedule(run.optimizer)
    progress.batch += 1
    progress.step += 1
    progress.audio_seconds += float(batch.lengths.sum()) * batch.waves.shape[1] / SAMPLE_RATE
    if progress.step % 100 == 0:
        speed = progress.audio_seconds / run.clock()
        print(
            f"step {progress.step}  loss {loss:.2f} (CTC {loss_ctc:.2f}, decoder {loss_output:.2f})"
            f"  lr {rate:.2e}  {speed:.1f} audio-s per CPU-s",
            flush=True,
        )


def end_epoch(run: Run, validation: list[Utterance], whole: bool) -> None:
    """Validate, keep the weights if among the best, and save a checkpoint."""
    progress = run.progress
    run.model.eval()
    accuracy = AccuracyStats()
    with torch.no_grad():
        for utterances in batches_of(validation, VALID_SECONDS):
            batch = collate(utterances, run.tokenizer)
            _, output = run.model(batch, progress.epoch)
            accuracy.append(output, batch.targets, batch.target_lengths)
    reached = accuracy.summarize()
    print(
        f"epoch {progress.epoch}{'' if whole else ' (part)'}  step {progress.step}  "
        f"validation accuracy {reached:.4f}  {run.clock() / 3600:.3f} CPU-hours",
        flush=True,
    )
    kept = run.folder / "best"
    kept.mkdir(exist_ok=True)
    torch.save(run.model.state_dict(), kept / f"{reached:.5f}_{progress.step}.pt")
    for worse in sorted(kept.iterdir())[:-AVERAGED]:  # names begin with the accuracy
        worse.unlink()
    if whole:
        progress.epoch += 1
        progress.batch = 0
    run.save()


def searcher(model: Conformer, beam: int) -> S2STransformerBeamSearcher:
    ctc = CTCScorer(ctc_fc=model.ctc, blank_index=BLANK, eos_index=EOS)
    return S2STransformerBeamSearcher(
        modules=[model.transformer, model.output],
        bos_index=BOS,
        eos_index=EOS,
        min_decode_ratio=0.0,
        max_decode_ratio=1.0,
        beam_size=beam,
        using_eos_threshold=False,
        length_normalization=True,
        scorer=ScorerBuilder(full_scorers=[ctc], weights={"ctc": CTC_WEIGHT_DECODE}),
    )


@torch.no_grad()
def transcribe(run: Run, utterances: list[Utterance]) -> dict[str, list[str]]:
    """-> transcripts of each way of decoding, with the averaged weights in fp32."""
    model = run.model
    model.load_state_dict(average_state_dicts(map(torch.load, (run.folder / "best").iterdir())))
    model.eval()
    searches = {"greedy": searcher(model, 1), f"beam {BEAM}": searcher(model, BEAM)}
    texts: dict[str, list[str]] = {name: [] for name in [*searches, "CTC greedy"]}
    for one in utterances:  # not in batches, because padding changes the last encoder states
        batch = collate([one], run.tokenizer)
        states = model.encode(batch)
        found = {name: search(states, batch.lengths)[0] for name, search in searches.items()}
        found["CTC greedy"] = ctc_greedy_decode(model.ctc(states), batch.lengths, BLANK)
        for name, [tokens] in found.items():
            texts[name].append(run.tokenizer.decode(tokens))
    return texts


def error_rates(utterances: list[Utterance], texts: list[str]) -> dict[str, float]:
    """WER of all utterances and, if there are several, of each source."""
    pairs: dict[str, list[tuple[str, str]]] = {"all": []}
    for one, text in zip(utterances, texts, strict=True):
        pairs["all"].append((one.text, text))
        pairs.setdefault(one.source, []).append((one.text, text))
    if len(pairs) == 2:
        pairs = {"all": pairs["all"]}
    return {name: jiwer.wer(*map(list, zip(*some, strict=True))) for name, some in pairs.items()}


def report(run: Run, table: str) -> None:
    utterances, progress = read_table(table), run.progress
    found = transcribe(run, utterances)
    wer = {name: error_rates(utterances, texts) for name, texts in found.items()}
    figures = {
        "parameters": sum(one.numel() for one in run.model.parameters()),
        "cpu_hours": round(progress.cpu_seconds / 3600, 3),
        "steps": progress.step,
        "epochs": progress.epoch - 1,
        "audio_hours": round(progress.audio_seconds / 3600, 3),
        "precision": run.options.precision,
        "averaged": len(list((run.folder / "best").iterdir())),
        "table": Path(table).name,
    }
    print(json.dumps(figures | {"wer": wer}))
    for name, value in figures.items():
        print(f"{name:12} {value}")
    print(f"{'WER in %':12}" + "".join(f"{part:>18}" for part in wer["greedy"]))
    for name, errors in wer.items():
        print(f"{name:12}" + "".join(f"{100 * error:18.1f}" for error in errors.values()))


if __name__ == "__main__":
    main()
