"""What measures and teaches: ladders and their rungs, discovery, profiles, plots, deep SASS."""
