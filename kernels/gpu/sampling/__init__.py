"""Sampling on a GPU: what rows of logits go through, a kernel a file, from penalties to the token that is drawn.

Which of them a row needs is the worker's to say (`worker_svc.sampling`), not theirs.
"""
