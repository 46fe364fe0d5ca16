"""Train a tiny VDN-H3 on procedural clips with sound, stage by stage, into a release of a few megabytes."""
