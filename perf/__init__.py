"""One script per question; each prints a ratio against something measured or computed alike."""
