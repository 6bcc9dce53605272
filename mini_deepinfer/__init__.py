"""mini-DeepInfer: a small, readable, prefill-first inference engine for DeepSeek-V4.1-Flash."""

__version__ = "0.1.0"
