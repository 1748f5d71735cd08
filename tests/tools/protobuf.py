"""Messages of protobuf as numbers and values: what a trace for Perfetto consists of."""

from collections.abc import Iterator


def wire(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: number and value."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            assert kind in (1, 2, 5) and at + size <= len(message)
            value = message[at : at + size]
            at += size
            yield number, value if kind == 2 else int.from_bytes(value, "little")


def fields(message: bytes) -> dict[int, list]:
    """The values of a message by the number of their field."""
    found: dict[int, list] = {}
    for number, value in wire(message):
        found.setdefault(number, []).append(value)
    return found
