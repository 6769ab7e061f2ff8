"""What tokenmill says about itself: logs. Knows none of the parts that speak."""
