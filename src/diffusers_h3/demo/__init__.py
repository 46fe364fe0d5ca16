"""The embedded release: a complete VDN-H3 release of a few megabytes, built by code from a seed."""
