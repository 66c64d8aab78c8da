"""Which keys of an LSTM's norms fit together; without pydantic, which the layer does not need."""

VARIABLE_CELLS = ("ba", "per_gate", "joined")  # LSTM norms that cell_norm and hidden_norm vary


def check_norms_fit(norm: str, cell_norm: str | None, hidden_norm: bool, norm_kind: str) -> None:
    """Raise ValueError for a key of an LSTM's norms that does not fit `norm`."""
    fit = "use norm = ba, per_gate or joined"
    if norm not in VARIABLE_CELLS and cell_norm is not None:
        alone = "" if norm == "cell" else ", or norm = cell for a norm of c alone"
        raise ValueError(
            f"cell_norm = {cell_norm} does not fit norm = {norm}, which fixes it; {fit}{alone}"
        )
    if norm not in VARIABLE_CELLS and hidden_norm:
        raise ValueError(f"hidden_norm = true does not fit norm = {norm}; {fit}")
    if norm not in (*VARIABLE_CELLS, "cell") and norm_kind != "layer":
        fit = "use norm = ba, per_gate, joined or cell"
        raise ValueError(f"norm_kind = {norm_kind} does not fit norm = {norm}; {fit}")
