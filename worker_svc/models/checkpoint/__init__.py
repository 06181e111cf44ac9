"""What is read of a checkpoint: its files, tensors that are known before they are read, and weights by their names.

How quantised ones are stored is not here (`worker_svc.models.quantized`), and neither is what is made of weights.
"""
