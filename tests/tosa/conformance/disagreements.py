"""Where the project and the conformance generator disagree and the project is to stay as it is, with the reasons.

The whole run fails where one of these is no longer seen.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.tosa.conformance.campaign import Outcome
    from tests.tosa.conformance.judge import Finding


@dataclass(frozen=True)
class Expected:
    """A disagreement.

    Attributes:
        question: of ``Finding``.
        kinds: TOSA operators.
        detail: a regular expression that the finding's text has.
        reason: why it stays.
        example: entry of the generator's configuration and test that show it.
    """

    question: str
    kinds: tuple[str, ...]
    detail: str
    reason: str
    example: tuple[str, str]

    def explains(self, kind: str, outcome: Outcome, finding: Finding) -> bool:
        """Whether a finding is this one."""
        return (
            finding.question == self.question
            and kind in self.kinds
            and re.search(self.detail, finding.detail) is not None
        )


EXPECTED: Sequence[Expected] = ()
