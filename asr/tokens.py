"""The four special tokens, the same numbers for every vocabulary and every model."""

BLANK = 0  # CTC's empty label; also what padding is filled with
UNK = 1  # a character that the training text did not have
SOS = 2  # start of sentence: the decoder's first input
EOS = 3  # end of sentence: the decoder's last target

SPECIAL = ("<blank>", "<unk>", "<sos>", "<eos>")
