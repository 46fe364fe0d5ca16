"""Pipelines: text and keyframes in, video with sound out."""
