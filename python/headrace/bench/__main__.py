"""`python -m headrace.bench`."""

from headrace.bench._program import main

if __name__ == "__main__":
    main()
