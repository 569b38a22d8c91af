"""What the tests share: tiny models, float64 references, tolerances, NaN-safe comparison."""
