"""The demo: a trained VDN-H3 of a few megabytes, what it knows, and a command to try it."""
