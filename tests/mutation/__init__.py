"""Random changes of the product: ``mutations`` makes them, ``lines`` learns which tests run which lines, ``__main__`` tries them."""
