"""One side's curvature as pure functions; a method picks a representation for each side."""
