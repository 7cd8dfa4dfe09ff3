"""A module that cannot be imported, and says so in three lines."""

raise RuntimeError("no\nsuch\nluck")
