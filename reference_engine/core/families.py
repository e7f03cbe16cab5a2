"""Requests that were asked for as one: n answers to a prompt are n requests and a parent.

The parent is a name and nothing else; it is gone with the last of its children.
"""


class Families:
    """Which requests belong to which parent. Changes in `add` and `ended` only."""

    def __init__(self) -> None:
        self._children: dict[str, list[str]] = {}
        self._parent_of: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._children)

    def add(self, parent_id: str, request_id: str) -> None:
        self._children.setdefault(parent_id, []).append(request_id)
        self._parent_of[request_id] = parent_id

    def members(self, name: str) -> list[str]:
        """The children of a parent in order, or the name itself where it is no parent's."""
        return list(self._children.get(name, [name]))

    def ended(self, request_id: str) -> None:
        """A request has ended; not an error for one without a parent."""
        parent_id = self._parent_of.pop(request_id, None)
        if parent_id is None:
            return
        children = self._children[parent_id]
        children.remove(request_id)
        if not children:
            del self._children[parent_id]
