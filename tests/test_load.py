"""Ensembles of runs against the mean of each run's scores by torch; incompatible runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_evaluate import hypothesis_rows
from test_fusion import save_language_run
from torch.nn.functional import ctc_loss

from asr import evaluate, train
from asr.config.loader import validate
from asr.data.corpus import read_manifest
from asr.data.tokenizer import BLANK, EOS, SOS, Characters
from asr.features.normalize import MeanVarianceNorm
from asr.inference import evaluation
from asr.inference.bulk import identity
from asr.inference.decode import best_hypotheses, encode
from asr.inference.derived import write_run
from asr.inference.evaluation import read_batches
from asr.inference.load import STATISTICS, load_run_recipe
from asr.inference.recognition import Recognizer
from asr.models import build
from asr.shipped import find_run

TRANSFORMER = {"kind": "transformer", "d_model": 8, "heads": 2, "feed_forward": 13}
TRANSFORMER |= {"encoder_layers": 2, "decoder_layers": 1}
WEIGHT = 0.3
SEARCH = [f"decode.ctc_weight={WEIGHT}", "decode.beam=3"]
# With these settings a hypothesis' score is the sum of its tokens' log-probabilities.
SUMS = ["decode.length_penalty=0", "decode.eos_threshold=null", "decode.speeds=[0.9,1.0,1.1]"]
SHORT = "decode.batch_seconds=0.1"


def save_run(run, like, seed=5, tokenizer=None, **changes):
    """An untrained run with the recipe of another, except for `changes` group by group."""
    tree = load_run_recipe(like).model_dump(mode="json")
    for group, keys in changes.items():
        tree[group] = keys if group == "model" and "kind" in keys else {**tree[group], **keys}
    recipe, tokenizer = validate(tree, "test"), tokenizer or Recognizer.load(like).tokenizer
    front_end = build.build_front_end(recipe.features)
    torch.manual_seed(seed)
    model = build.build_speech_model(recipe.model, front_end.size, tokenizer.size)
    for weight in model.parameters():
        weight.data.mul_(2.0)  # untrained, but with peaked distributions
    recognizer = Recognizer(model, tokenizer, front_end, recipe.decode, max_segment_seconds=30.0)
    write_run(run, recipe, recognizer, 1, 1.0)
    return run


def together(*runs):
    return f"decode.ensemble=[{','.join(map(str, runs))}]"


def score_alone(model, memory, tokens):
    """One model's score of a sentence (U,) of one utterance: decoder and CTC, as in the search."""
    logits = model.decode(memory, torch.tensor([[SOS, *tokens]]))
    each = logits.log_softmax(dim=2)[0].gather(1, torch.tensor([*tokens, EOS])[:, None])
    ctc, lengths = model.ctc(memory).transpose(0, 1), torch.tensor([memory.valid.shape[1]])
    loss = ctc_loss(
        ctc, torch.tensor([tokens]), lengths, torch.tensor([len(tokens)]), BLANK, reduction="none"
    )
    return (1 - WEIGHT) * float(each.sum()) - WEIGHT * float(loss)


@torch.no_grad()
def test_a_sentence_has_the_mean_score_of_the_single_runs(tiny, tiny_run, tmp_path):
    """Two families, three speeds: six memories."""
    other = save_run(tmp_path / "other", tiny_run, model=TRANSFORMER)
    ours = Recognizer.load(tiny_run, [*SEARCH, *SUMS, SHORT, together(other)])
    corpus, recipe = (
        read_manifest(tiny.parent / "test.tsv"),
        load_run_recipe(tiny_run, [*SUMS, SHORT]),
    )
    models = [Recognizer.load(run).model.eval() for run in (tiny_run, other)]
    compared = 0
    for batch in read_batches(ours, corpus, recipe):  # of one utterance each
        encoded = encode((ours.model, *ours.ensemble), batch)
        ((actual,),) = best_hypotheses(encoded, ours.decode)
        if actual.tokens:
            memories = [(m, m.encode(f, n)) for m in models for f, n in batch.all_speeds]
            alone = [score_alone(m, memory, actual.tokens) for m, memory in memories]
            assert len(set(alone)) == 6
            assert actual.score == pytest.approx(sum(alone) / 6, abs=1e-3)
            compared += 1
    assert compared > 1


def test_an_ensemble_of_a_run_with_itself_equals_the_run(tiny, tiny_run):
    corpus = read_manifest(tiny.parent / "test.tsv")
    alone, twice = (Recognizer.load(tiny_run, [*SEARCH, *o]) for o in ([], [together(tiny_run)]))
    for utterance in corpus:
        one, two = alone(utterance.audio), twice(utterance.audio)
        assert one.text == two.text and one.score == pytest.approx(two.score, abs=1e-4)


def test_features_changed_on_the_command_line_are_those_of_all(tiny_run, tmp_path):
    other = save_run(tmp_path / "other", tiny_run, model=TRANSFORMER)
    changed = ["features.mvn=speaker", together(other)]
    assert len(Recognizer.load(tiny_run, changed).ensemble) == 1


def test_files_match_the_split(tiny, tiny_run, commands, tmp_path):
    settings = [*SEARCH, together(save_run(tmp_path / "other", tiny_run))]
    out = tmp_path / "out"
    assert commands(evaluate, tiny_run, "--split", "test", *settings, "--out", out)[0] == 0
    rows = {row["id"]: row["hypothesis"] for row in hypothesis_rows(out)}
    recognizer = Recognizer.load(tiny_run, settings)
    corpus = read_manifest(tiny.parent / "test.tsv")
    transcripts = dict(recognizer.transcribe_files([u.audio for u in corpus]))
    assert {u.id: transcripts[u.audio].text for u in corpus} == rows
    alone = Recognizer.load(tiny_run, SEARCH)
    assert any(alone(u.audio).score != transcripts[u.audio].score for u in corpus)
    decode = json.loads((out / "score.json").read_text())["about"]["decode"]
    assert decode["ensemble"] == [str(tmp_path / "other")]
    assert "ensemble with" in (out / "page.html").read_text()


def test_the_checkpoint_choice_of_the_first_run_applies_to_all(tiny_run, run):
    for average in (1, 2):
        overrides = [f"decode.average={average}"]
        ours = Recognizer.load(tiny_run, [*overrides, together(run)]).ensemble[0].state_dict()
        judge = Recognizer.load(run, overrides).model.state_dict()
        assert all(torch.equal(ours[name], weight) for name, weight in judge.items())


def of_other_words(tmp_path, like):
    return save_run(tmp_path / "other", like, tokenizer=Characters.train(["xyz"]))


def of_other_features(tmp_path, like):
    return save_run(tmp_path / "other", like, features={"mel_bins": 13, "mvn": "none"})


def without_ctc(tmp_path, like):
    return save_run(tmp_path / "other", like, model={"ctc_weight": 0.0})


def test_training_does_not_begin_with_weights_of_another_task(tiny, tiny_run, commands, tmp_path):
    other = of_language(tmp_path, tiny_run)
    line = commands.refused(train, tiny, f"train.init={other}", "--run", tmp_path / "run")
    assert line == f"train.init = {other}: a run of the task language; name one of speech"


def of_language(tmp_path, like):
    save_language_run(tmp_path / "other", Recognizer.load(like).tokenizer)
    return tmp_path / "other"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (of_other_words, "its vocabulary differs from the first run's"),
        (of_other_features, "its features.mel_bins, features.mvn differ from the first run's"),
        (without_ctc, "it has no CTC head for decode.ctc_weight = "),
        (
            of_language,
            "a run of the task language, without speech to decode; a speech run decodes",
        ),
        (lambda tmp_path, _: tmp_path / "other", "there is no such run. Make it with: python -m"),
    ],
)
def test_a_run_that_cannot_join_an_ensemble_is_one_line(
    make, reason, tiny_run, commands, tmp_path, monkeypatch
):
    other = make(tmp_path, tiny_run)
    monkeypatch.setattr(evaluation, "decode_split", lambda *_: pytest.fail("decoded in vain"))
    more = [together(other), "decode.ctc_weight=0.3"]
    line = commands.refused(evaluate, tiny_run, "--split", "test", *more)
    assert line.startswith(f"decode.ensemble: {other}: {reason}")


def test_without_ctc_in_the_search_a_run_needs_no_head_for_it(tiny_run, tmp_path):
    more = [together(without_ctc(tmp_path, tiny_run)), "decode.ctc_weight=0"]
    assert len(Recognizer.load(tiny_run, more).ensemble) == 1


def test_statistics_of_the_corpus_must_be_the_same(tiny_run, tmp_path):
    runs = [save_run(tmp_path / n, tiny_run, features={"mvn": "global"}) for n in ("a", "b", "c")]
    for run, seed in zip(runs, (1, 1, 2), strict=True):
        norm = MeanVarianceNorm("global")
        norm.add(torch.randn(29, 11, generator=torch.Generator().manual_seed(seed)))
        norm.save(run / STATISTICS)
    assert len(Recognizer.load(runs[0], [together(runs[1])]).ensemble) == 1
    with pytest.raises(
        Exception, match=f"its statistics in {STATISTICS} differ from the first run's"
    ):
        Recognizer.load(runs[0], [together(runs[2])])


def test_a_list_s_transcripts_depend_on_the_weights_of_all(tiny_run, tmp_path):
    other = save_run(tmp_path / "other", tiny_run)
    plain = identity(tiny_run, load_run_recipe(tiny_run))
    both = identity(tiny_run, load_run_recipe(tiny_run, [together(other)]))
    assert [key for key in both if both[key] != plain[key]] == ["decode.ensemble"]
    other.rename(tmp_path / "moved")
    moved = load_run_recipe(tiny_run, [together(tmp_path / "moved")])
    assert identity(tiny_run, moved) == both
    shutil.rmtree(tmp_path / "moved")
    save_run(tmp_path / "moved", tiny_run, seed=6)
    assert identity(tiny_run, moved)["decode.ensemble"] != both["decode.ensemble"]


def test_a_list_may_be_transcribed_with_shipped_runs_by_name():
    run, other = (find_run(Path(name)) for name in ("conformer", "las"))
    named, by_path = (
        identity(run, load_run_recipe(run, [f"decode.ensemble=[{member}]"]))
        for member in ("las", other)
    )
    assert named == by_path and named["decode.ensemble"]
