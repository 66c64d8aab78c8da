"""The tests on every Python that is supported: nox, or nox -s tests-3.10 -- tests/test_wer.py

Needs nox and uv, which finds or downloads the Pythons: uvx nox
"""

import nox

nox.options.default_venv_backend = "uv"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, or the files that are named after `--`."""
    session.install("-e", ".[test]")
    session.run("pytest", "-q", *session.posargs, env={"OMP_NUM_THREADS": "1"})
