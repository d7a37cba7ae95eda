"""A container's environment, as the pod's spec tells it. What images, device plugins and hooks add does not stand there."""

import re

from exporter.snapshot import Container, EnvVar, Pod

_FIELD = re.compile(r"metadata\.(annotations|labels)\['([^']+)'\]")


def variable_of(container: Container, name: str) -> EnvVar | None:
    """Answer the variable of that name. Of several the last one is what the container's processes see."""
    return next((variable for variable in reversed(container.env) if variable.name == name), None)


def text_of(pod: Pod, container: Container, name: str) -> str | None:
    """Answer the variable's text, a literal or a fieldRef to an annotation or label of the pod; None where it is empty or not told.

    The kubelet makes an empty variable of a key that the pod does not have.
    """
    variable = variable_of(container, name)
    if variable is None:
        return None
    if match := _FIELD.fullmatch(variable.field_path or ""):
        return (pod.annotations if match[1] == "annotations" else pod.labels).get(match[2]) or None
    return variable.value or None
