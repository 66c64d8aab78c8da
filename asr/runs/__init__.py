"""Run folders: how a run is led, gone on with, looked into and read again; grids of them."""
