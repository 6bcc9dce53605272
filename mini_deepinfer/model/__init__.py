"""The model, block by block; names follow the checkpoint."""

from mini_deepinfer.model.transformer import Model

__all__ = ["Model"]
