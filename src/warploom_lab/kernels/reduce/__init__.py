"""A matrix product with a row reduction on top: the paper's experiment, and its fused softmax tile."""
