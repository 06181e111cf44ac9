"""The stop strings of one request as an automaton that reads a text character by character.

Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search" (CACM 1975). A state is the longest end
of the text that is the beginning of a string: node 0 is none of it. Built in time and memory linear in the strings,
stepped in amortised constant time, and never changed, so that all outputs of a request share one.

Nodes are numbered as they are made, string by string: the only child of a node is most often the next node.

    strings    "abc", "abd", "b"
    node       0 -a- 1 -b- 2 -c- 3        goes_on: 0, 1 and 2, whose next node is their child
                           2 -d- 4        branches: {(2, "d"): 4, (0, "b"): 5}
               0 -b- 5                    fallback: 2 -> 5, all others -> 0
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

NO_STRING = -1


class StopAutomaton:
    """Over at least one string, none of them empty.

    Attributes (by node):
        matched: index of the first listed string that is complete there, or NO_STRING.
        num_undecided: length of the longest end of the text that is the beginning of a string, and not all of it.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.matched = array("h", [NO_STRING])
        self.num_undecided = array("i", [0])
        self._letters = ["\0"]  # that lead to each node; joined below
        self._goes_on = bytearray(1)
        self._branches: dict[tuple[int, str], int] = {}
        self._fallback = array("i", [0])
        self._depth = array("i", [0])
        branches_of: dict[int, list[tuple[str, int]]] = {}
        for index, string in enumerate(self.strings):
            self._add(index, string, branches_of)
        self._text = "".join(self._letters)
        self._link(branches_of)
        first_letters = {string[0] for string in self.strings}
        self.first_letters = re.compile("[" + "".join(map(re.escape, sorted(first_letters))) + "]")
        del self._letters, self._depth

    def step(self, node: int, letter: str) -> int:
        """The state after one more character."""
        while not (child := self._child(node, letter)) and node:
            node = self._fallback[node]
        return child

    def _child(self, node: int, letter: str) -> int:
        """0: there is none."""
        if self._goes_on[node] and self._text[node + 1] == letter:
            return node + 1
        return self._branches.get((node, letter), 0) if self._branches else 0

    # ---- building ---------------------------------------------------------------------------------------------------

    def _add(self, index: int, string: str, branches_of: dict[int, list[tuple[str, int]]]) -> None:
        node = 0
        for letter in string:
            if self._goes_on[node] and self._letters[node + 1] == letter:
                node += 1
            elif (branch := self._branches.get((node, letter))) is not None:
                node = branch
            else:
                node = self._new_child(node, letter, branches_of)
        if self.matched[node] == NO_STRING:
            self.matched[node] = index

    def _new_child(self, node: int, letter: str, branches_of: dict[int, list[tuple[str, int]]]) -> int:
        child = len(self._letters)
        if child == node + 1:
            self._goes_on[node] = True
        else:
            self._branches[node, letter] = child
            branches_of.setdefault(node, []).append((letter, child))
        self._letters.append(letter)
        self._goes_on.append(False)
        self.matched.append(NO_STRING)
        self.num_undecided.append(0)
        self._fallback.append(0)
        self._depth.append(self._depth[node] + 1)
        return child

    def _link(self, branches_of: dict[int, list[tuple[str, int]]]) -> None:
        """Fallbacks, and what follows from them, the shallow nodes first: each relies on shallower ones."""
        level = [0]
        while level:
            deeper = []
            for node in level:
                children = list(branches_of.get(node, ()))
                if self._goes_on[node]:
                    children.append((self._text[node + 1], node + 1))
                fallback = self._fallback[node]
                is_beginning = node and children
                self.num_undecided[node] = self._depth[node] if is_beginning else self.num_undecided[fallback]
                complete = self.matched[fallback]  # at the same character, and maybe listed before the node's own
                if complete != NO_STRING and (self.matched[node] == NO_STRING or complete < self.matched[node]):
                    self.matched[node] = complete
                for letter, child in children:
                    self._fallback[child] = self.step(fallback, letter) if node else 0
                    deeper.append(child)
            level = deeper
