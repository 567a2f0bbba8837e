"""Other libraries that can use headrace in the place of their own operators."""
