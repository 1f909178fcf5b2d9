"""Reads the header of .pt2 files, which `torch.export.save` writes. PyTorch is not needed."""
