"""The open round of a BSP run: who is in, the sums so far, what completes it."""
