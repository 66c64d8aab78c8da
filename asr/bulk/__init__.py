"""Transcribing a long list of files, by any number of processes.

job.py     what is to be done, and the folder that it goes to
claims.py  who does which part
work.py    doing it, and making one table of it all
"""
