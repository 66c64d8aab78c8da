"""What can be trained: a task brings its corpus, objective and what validation shows."""
