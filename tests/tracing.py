"""Walks a traced function, to check what it would compute without running it."""

from collections.abc import Iterator


def equations(jaxpr) -> Iterator:
    """Every equation of a jaxpr, those of loops, branches, calls and custom rules included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def shapes(jaxpr) -> list[tuple[int, ...]]:
    """Shapes of everything the function computes on the way."""
    return [v.aval.shape for equation in equations(jaxpr) for v in equation.outvars if hasattr(v.aval, "shape")]
