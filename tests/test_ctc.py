"""CTC decoding against sums over every path of a tiny space."""

import torch

from asr.decoding.ctc import collapse, ctc_greedy


def random_log_probs(*shape, seed=0, sharpness=2.0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=draw, dtype=torch.float64) * sharpness).log_softmax(-1)


def test_collapse_joins_neighbours_and_drops_blanks():
    assert collapse([0, 4, 4, 0, 4, 5, 5, 0, 0, 5]) == [4, 4, 5, 5]
    assert collapse([7, 7, 0]) == [7]
    assert collapse([0, 0]) == []
    assert collapse([]) == []


def test_greedy_reads_the_best_path_of_real_frames_only():
    log_probs = random_log_probs(3, 13, 5)
    valid = torch.arange(13) < torch.tensor([13, 7, 0])[:, None]
    for utterance, length in enumerate([13, 7, 0]):
        best = [int(frame.argmax()) for frame in log_probs[utterance, :length]]
        said = [b for a, b in zip([0, *best], best, strict=False) if a != b and b != 0]
        assert ctc_greedy(log_probs, valid)[utterance] == said
    assert ctc_greedy(log_probs, valid)[2] == []
