"""Attention processors, and the attention backend behind one of them, for Diffusers' transformers."""
