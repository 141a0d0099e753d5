"""How a text says that it is under a licence a corpus may not hold: the names such licences go by, the sentences that
declare one, and those that leave a choice. A mere mention declares nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

NOTICES: list[tuple[str, re.Pattern[str]]] = [
    (name, re.compile(pattern, re.I))
    for name, pattern in (
        ("AGPL-3.0-or-later", r"GNU Affero General Public|\bAGPL"),
        ("LGPL-2.1-or-later", r"GNU (?:Lesser|Library) General Public|\bLGPL"),
        ("GFDL-1.3-or-later", r"GNU Free Documentation|\bGFDL"),
        ("GPL-2.0-or-later", r"GNU General Public|\bGNU licen[cs]e|\bGPL|gnu\.org/(?:licen[cs]es|copyleft)"),
        ("MPL-2.0", r"Mozilla Public Licen[cs]e|\bMPL[- v]*\d"),
        ("EPL-2.0", r"Eclipse Public Licen[cs]e|\bEPL[- v]*\d"),
        ("EUPL-1.2", r"European Union Public Licen[cs]e|\bEUPL\b"),
        ("CDDL-1.0", r"Common Development and Distribution Licen[cs]e|\bCDDL\b"),
        ("CPL-1.0", r"Common Public (?:Attribution )?Licen[cs]e|\bCPAL\b|IBM Public Licen[cs]e"),
        ("OSL-3.0", r"Open Software Licen[cs]e|\bOSL[- v]*\d"),
        ("MS-RL", r"Microsoft (?:Reciprocal|Limited) |\bMs-?RL\b"),
        ("CECILL-2.1", r"\bCeCILL(?!-B)"),
        ("ODbL-1.0", r"Open Database Licen[cs]e|\bODbL\b"),
        ("RPL-1.5", r"Reciprocal Public Licen[cs]e|\bQ Public Licen[cs]e|\bSleepycat\b"),
        ("GPL-1.0-or-later", r"same terms as Perl"),
        (
            "CC-BY-SA-4.0",
            r"Attribution[- ](?:Non-?Commercial[- ])?Share-?Alike|\bCC[- ]BY[- ](?:NC[- ])?SA|licenses/by-(?:nc-)?sa\b",
        ),
        (
            "CC-BY-NC-4.0",
            r"Attribution[- ]Non-?Commercial|\bCC[- ]BY[- ]NC|licenses/by-nc\b|\bnon-?commercial (?:use|purposes?) only"
            r"|only for non-?commercial",
        ),
        ("CC-BY-ND-4.0", r"Attribution[- ]No-?Deriv|\bCC[- ]BY[- ](?:NC[- ])?ND|licenses/by-(?:nc-)?nd\b"),
        ("SSPL-1.0", r"Server Side Public Licen[cs]e|\bSSPL\b"),
        ("BUSL-1.1", r"Business Source Licen[cs]e|\bBU?SL[- ]?1\.1"),
        ("Elastic-2.0", r"\bElastic Licen[cs]e"),
        ("PolyForm-Noncommercial-1.0.0", r"\bPolyForm\b"),
        ("LicenseRef-source-available", r"Functional Source Licen[cs]e|\bFSL-1|Fair Source Licen|Prosperity Public"),
        ("LicenseRef-model", r"\b(?:Open)?RAIL(?:\+\+)?-?M?\b|Llama[ \d.]* Community Licen[cs]e"),
        ("LicenseRef-commons-clause", r"Commons Clause"),
        ("LicenseRef-copyleft", r"licen[cs]e: *copyleft"),
        ("Beerware", r"\bBEER-?WARE\b"),
        (
            "LicenseRef-proprietary",
            r"proprietary and confidential|confidential and proprietary|unauthori[sz]ed copy|internal use only"
            r"|without an express licen[cs]e|(?:research|academic|evaluation)(?: use| purposes?)? only"
            r"|end[- ]user licen[cs]e agreement|\bno licen[cs]e (?:is )?granted|may not copy,? (?:modify|distribute)"
            r"|commercial use is (?:strictly )?(?:prohibited|forbidden|not (?:allowed|permitted))",
        ),
    )
]  # fmt: skip
MENTION = re.compile(r"\b[AL]?GPL(?![- ]?v?\d)", re.I)
"""An abbreviation that in the head of a file is a mere mention, where nothing of this stands beside it:"""
CONTEXT = re.compile(r"licen[cs]|terms|distribut|copy|free software|\bunder\b|author|©|lizenz", re.I)
LEAD = r"(?:#|//|/?\*+|--|;|%|!|'(?!'')|<!--|\.\. |(?i:rem|dnl)\b)"
BLOCKS = "|".join(
    rf"{begin}[\s\S]*?{end}"
    for begin, end in (
        ('"""', '"""'),
        ("'''", "'''"),
        (r"/\*", r"\*/"),
        ("<!--", "-->"),
        (r"\(\*", r"\*\)"),
        ("{-", "-}"),
    )
)
HEADER = re.compile(rf"(?:[ \t]*[rRuU]?(?:{BLOCKS})[^\n]*\n?|[ \t]*{LEAD}[^\n]*(?:\n|\Z)|[ \t\r\f]*\n)+")
"""The comments with which a file begins, in many languages."""
DECLARES = re.compile(
    r"(?:licen[cs]ed|released|distributed|redistribute|available|published|provided|covered|modify)\b[^.]{0,80}?"
    r"\bunder\b[^.]{0,80}|(?:under|to|by) (?:the )?terms(?: and conditions)? of[^.]{0,80}|governed by[^.]{0,80}",
    re.I,
)
"""Sentences that say under which licence something is, in text without line ends."""
KEYED = re.compile(r"(?:\b|_)licen[cs]e[_\"']*[ \t]*[:=][^\n]{0,100}", re.I)
ALONE = re.compile(
    r"^[ \t]*(?:#|//|\*|--|;|%)[^\w\n]*(?:(?:GNU )?[AL]?GPL[ -]?v?\d?(?:\.\d)?\+?(?:[- ]or[- ]later|[- ]only)?"
    r"(?: licen[cs]ed?)?[^\w\n]*$"
    r"|[^\n]*\bCC[- ]BY[- ](?:NC[- ])?SA\b[^\n]*$|[^\n]*(?:\(c\)|copyright|©)[^\n]*\b[AL]?GPL\b[^\n]*$)",
    re.I | re.M,
)
"""Comments that say no more than the name of a licence, or whose code they quote."""
NAMED = re.compile(r"\b(?:under|by)(?: the| a| an)? ([^,;:()]{2,60}?) licen[cs]es?\b", re.I)
CUES = ("licen", " under ", "under\n", " under the", "gpl", "cc by", "cc-by", "terms of", "same terms")
"""In lower case: a declaring sentence holds one of these."""
HINTS = (
    "licen", "gpl", "gnu", "cc by", "cc-by", "share-alike", "sharealike", "terms of", "same terms", "unauthori",
    "lizenz",
)  # fmt: skip
HEAD_HINTS = (
    *HINTS, "proprietary", "confidential", "commercial", "use only", "purposes only", "gfdl", "mpl", "epl", "eupl",
    "cddl",
    "odbl", "sspl", "polyform", "fsl-", "rail", "creativecommons",
)  # fmt: skip
"""In lower case: a text (the head of one) without any of these has no notice that would matter."""
AROUND = 160
"""Characters before and after a cue in which its sentence lies."""
CHOICE = re.compile(
    r"\bor\b(?!\W+(?:any\W+)?(?:later|newer|above|at your))|\bdual|\beither\b(?!\W+version)|\bchoose|\bchoice"
    r"|/(?=[AL]?GPL|MIT|BSD|Apache)",
    re.I,
)
COMMON = re.compile(r"\b(?:MIT|BSD|Apache|ISC|Zlib|Unlicense|CC0|0BSD|Boost)\b")


class Notices:
    """notices = Notices({"MIT": "MIT License", …}, permits)
    notices.of_file(text)        # SPDX names of what the text declares and `permits` refuses
    """

    def __init__(self, names: Mapping[str, str], permits: Callable[[str], bool]):
        self._permits = permits
        self._known: dict[str, str] = {}
        for spelled in (list(names), list(names.values())):
            self._known |= dict(zip(map(_plain, spelled), names, strict=True))
        for plain, name in list(self._known.items()):  # without its version it is what is permitted, if anything is
            bare = re.sub(r"(?: \d+)+$", "", plain)
            if bare not in self._known or (permits(name) and not permits(self._known[bare])):
                self._known[bare] = name

    def known(self, said: str) -> str:
        """SPDX name of the licence that is called so, or empty."""
        return self._known.get(_plain(said), "")

    def of_file(self, text: str) -> list[str]:
        found: list[str] = []
        head = HEADER.match(text)
        if head:
            lower = head.group().lower()
            if any(hint in lower for hint in HEAD_HINTS):
                found += self.refused(_flat(head.group()), mentions=False)
        lower = ascii_lower(text)
        for begin, end in _windows(lower) if any(hint in lower for hint in HINTS) else ():
            window = text[begin:end]
            for said in KEYED.findall(window):
                found += self.refused(_flat(said)) or self._value(said)
            for sentence in DECLARES.findall(_flat(window)):
                found += self.refused(sentence) or self._sentence(sentence)
            for said in ALONE.findall(window):
                found += self.refused(_flat(said))
        return list(dict.fromkeys(found))

    def refused(self, flat: str, mentions: bool = True) -> list[str]:
        """The first of NOTICES that a text without line ends gives, where no permitted licence may be chosen instead;
        `mentions`: also by a mere abbreviation."""
        sentences = [one for one in re.split(r"\.(?=\s|$)", flat) if not (COMMON.search(one) and CHOICE.search(one))]
        for name, pattern in NOTICES:
            for sentence in sentences:
                said = pattern.search(sentence)
                if said and (mentions or not MENTION.match(sentence, said.start()) or CONTEXT.search(sentence)):
                    return [] if self._permits(name) else [name]
        return []

    def _value(self, said: str) -> list[str]:
        """`license = "JSON"`: what stands after the sign, when it is the name of a licence."""
        value = re.split(r"[:=]+", said, maxsplit=1)[1].strip(" \t\r\"'*#-/>,)")
        value = value.partition('"')[0].partition("'")[0]
        names = [name for part in re.split(r"\s(?:and|or)\s|[/,;&()]", value) if (name := self.known(part))]
        refused = [name for name in names if not self._permits(name)]
        return [] if len(refused) < len(names) and CHOICE.search(value) else refused

    def _sentence(self, sentence: str) -> list[str]:
        """`under the JSON license`"""
        names = [self.known(said) for said in NAMED.findall(sentence)]
        return [name for name in names if name and not self._permits(name)]


def ascii_lower(text: str) -> str:
    """In small letters, of the same length; what is not ASCII becomes `?`."""
    return (text if text.isascii() else text.encode("ascii", "replace").decode()).lower()


def _windows(lower: str) -> Iterator[tuple[int, int]]:
    """Where a declaring sentence may lie."""
    cues: list[int] = []
    for cue in CUES:
        at = lower.find(cue)
        while at >= 0:
            cues.append(at)
            at = lower.find(cue, at + len(cue))
    begin = end = 0
    for at in sorted(cues):
        if at - AROUND > end:
            if end:
                yield begin, end
            begin = max(0, at - AROUND)
            line = lower.rfind("\n", begin, at)
            begin = line + 1 if line >= 0 and at - line < 40 else begin
        end = at + AROUND
    if end:
        yield begin, end


def _flat(text: str) -> str:
    """Without comment marks and line ends."""
    text = re.sub(r"(?m)^[ \t]*(?:rem|dnl)\b|^[^\w\n]+|[#*/;%!|]{1,}\s*$|\\n[#*/ ]*", " ", text, flags=re.I)
    return " ".join(text.split())


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    words = [re.sub(r"^v(?=\d)", "", word) for word in words]
    return " ".join(word for word in words if word not in ("the", "license", "licence", "licensed", "version", "v"))
