"""`python -m headrace.torch.distributed`: what cutting sequences over ranks costs, measured and modelled."""

from headrace.torch.distributed._scaling import main

if __name__ == "__main__":
    main()
