"""The warm server: imports torch once, forks the ranks of each trial, supervises them."""
