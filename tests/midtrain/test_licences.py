"""No file survives under a licence that is not allowed, wherever and however that is declared; choices, exceptions and
mere mentions cost nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from corpora import GPL, MIT, made, source

from stretto.midtrain.corpus import metadata
from stretto.midtrain.corpus.licences import Licences
from stretto.midtrain.corpus.plan import PERMISSIVE
from stretto.midtrain.corpus.templates import Templates

pytest.importorskip("rensa", reason="the [corpus] extra is not installed")

LGPL = (
    "This library is free software; you can redistribute it and/or",
    "modify it under the terms of the GNU Lesser General Public",
    "License as published by the Free Software Foundation; either",
    "version 2.1 of the License, or (at your option) any later version.",
)
COPYLEFT = "# License\n\nThis project is licensed under the GNU GPL v3.\n"
LEADS = ("# ", "## ", "// ", ";; ", "-- ", "! ", "% ", "REM ", "#: ")
BLOCKS = (('"""', '"""'), ("'''", "'''"), ("/*", "*/"), ("<!--", "-->"))
HEADERS = (
    *("".join(f"{lead}{line}\n" for line in LGPL) for lead in LEADS),
    *("\n".join((begin, *LGPL, end, "")) for begin, end in BLOCKS),
    "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n\n" + "\n".join(('"""', *LGPL, '"""', "")),
    GPL,
    GPL.upper(),
    GPL.replace("GNU General", "GNU\u00a0General"),
    "# under the terms of the\n# GNU\n# General\n# Public\n# License\n",
    "# SPDX-License-Identifier: LGPL-3.0-only\n",
    "# spdx-license-identifier : gpl-3.0-only\n",
    "# SPDX-License-Identifier: GPL-2.0-only WITH Classpath-exception-2.0\n",
    "# SPDX-License-Identifier: MIT AND GPL-2.0-only\n",
    "# SPDX-License-Identifier: (MIT OR Apache-2.0) AND GPL-3.0-only\n",
    "# SPDX-License-Identifier: GPL-2.0-only OR MPL-2.0\n",
    "# SPDX-License-Identifier: MIT\n# SPDX-License-Identifier: GPL-3.0-only\n",
    "# SPDX-License-Identifier: LicenseRef-Proprietary\n",
    "import os\n" * 40 + "# SPDX-License-Identifier: AGPL-3.0-or-later\n",
    "# License: JSON\n",
    "# Distributed under the JSON license.\n",
    "# License: Open Software License 3.0\n",
    "# Licensed under the Microsoft Reciprocal License (MS-RL)\n",
    '__license__ = "GPLv3+"\n',
    "# Licence : LGPLv2.1\n",
    '"""\n:license: AGPLv3, see LICENSE\n"""\n',
    'KINDS = ["License :: OSI Approved :: GNU General Public License v3 (GPLv3)"]\n',
    "# This Source Code Form is subject to the terms of the Mozilla Public\n# License, v. 2.0.\n",
    "# Licensed under the MPL 2.0\n",
    "# Licensed under the EUPL, Version 1.2 or later\n",
    "# made available under the\n# terms of the Eclipse Public License v1.0\n",
    "# License: CDDL\n",
    "# License: CC BY-NC 4.0\n",
    "# This work is licensed under a Creative Commons Attribution-NoDerivatives 4.0 International License.\n",
    "# Licensed under https://creativecommons.org/licenses/by-sa/4.0/\n",
    "x = 1\n\n# From https://stackoverflow.com/a/1, CC BY-SA 3.0\n",
    "# This software is governed by the CeCILL license under French law\n",
    "# Licensed under the Elastic License 2.0\n",
    "# Licensed under the Functional Source License, Version 1.1\n",
    "# under the terms of the Llama 2 Community License Agreement.\n",
    "# for non-commercial use only\n",
    "# Proprietary and confidential.\n",
    "# Any use without an express license agreement is strictly prohibited.\n",
    "# the same terms as Perl itself: same terms as Perl\n",
    "import os\n\n# GPLv3\n",
    "# Dual licensed under GPL and LGPL\n",
)  # fmt: skip
FINE = (
    "# SPDX-License-Identifier: Apache-2.0\n",
    "# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception\n",
    "# SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause)\n",
    "# Dual licensed under the MIT or GPL Version 2 licenses.\n",
    "# Dual-licensed under the Apache License 2.0 and the GNU LGPL; you may choose either.\n",
    "# License: MIT\n",
    "# License: see LICENSE\n",
    "# faster than the GPL one\n",
    "# parses GPL headers of other programs\n",
    "# returned as JSON under the MIT license\n",
    "license = get_license(name)\n",
    'AGENT = "Mozilla/5.0 (X11; Linux)"\n',
    '"""Talk to PostgreSQL; GNU make is needed."""\n',
)


def test_no_file_with_a_notice_that_refuses_survives_and_others_do(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)
    for number, head in enumerate(HEADERS):
        (folder / f"bad_{number}.py").write_text(head + source(number))
    for number, head in enumerate(FINE):
        (folder / f"good_{number}.py").write_text(head + source(100 + number))
    rows = [
        {"text": GPL + source(300), "lang": "python", "license": "MIT"},
        {"text": source(301), "lang": "python", "license": ["MIT", "GPL-3.0-only"]},
        {"text": source(302), "lang": "python"},
        {"messages": [{"role": "tool", "content": GPL + source(303)}], "license": "MIT"},
        {"messages": [{"role": "tool", "content": json.dumps({"file": GPL + source(304)})}], "license": "MIT"},
        {"messages": [{"role": "user", "content": source(305)}], "license": "MIT"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kept, left, _ = made(tmp_path, ["repo", "rows.jsonl"], secrets=False)
    assert {name for name in kept if "bad" in name} == set()
    assert set(kept) == {*(f"repo/good_{number}.py" for number in range(len(FINE))), "rows.jsonl/rows.jsonl:6"}
    assert len(left["licence"]) == len(HEADERS) + 5


def repositories() -> Iterator[tuple[str, dict[str, str]]]:
    yield "file", {"LICENSE": COPYLEFT, "bad.py": ""}
    yield "beside", {"LICENSE": MIT, "COPYING": COPYLEFT, "bad.py": ""}
    yield "below", {"LICENSE": MIT, "a/b/c/COPYING": COPYLEFT, "a/b/c/d/bad.py": "", "a/b/good.py": ""}
    yield "folder", {"LICENSE": MIT, "sub/LICENSE": COPYLEFT, "sub/bad.py": "", "good.py": ""}
    yield "examples", {"examples/LICENSE": MIT, "examples/good.py": "", "bad.py": ""}
    yield (
        "reuse",
        {
            "LICENSES/MIT.txt": MIT,
            "LICENSES/GPL.txt": COPYLEFT,
            "bad.py": "",
            "good.py": "# SPDX-License-Identifier: MIT\n",
        },
    )
    yield "clause", {"LICENSE": f'"Commons Clause" License Condition v1.0\n\n{MIT}', "bad.py": ""}
    yield "added", {"LICENSE": f"{MIT}\nIt may be used for non-commercial purposes only.\n", "bad.py": ""}
    yield (
        "json",
        {
            "LICENSE": MIT.replace("THE SOFTWARE IS", "It shall be used for Good, not Evil.\n\nTHE SOFTWARE IS"),
            "bad.py": "",
        },
    )
    yield "wrapped", {"LICENSE": " ".join(MIT.split()), "good.py": ""}
    yield "nothing", {"README.md": "MIT licensed.", "bad.py": ""}
    yield (
        "readme",
        {"LICENSE": MIT, "README.md": "It is licensed under the GNU General Public License v3.\n", "bad.py": ""},
    )
    yield "pyproject", {"pyproject.toml": '[project]\nlicense = "GPL-3.0-or-later"\n', "bad.py": ""}
    yield "text", {"LICENSE": MIT, "pyproject.toml": '[project]\nlicense = {text = "GPL-3.0"}\n', "bad.py": ""}
    yield (
        "deep",
        {
            "LICENSE": MIT,
            "x/y/z/pyproject.toml": '[project]\nlicense = "AGPL-3.0"\n',
            "x/y/z/bad.py": "",
            "good.py": "",
        },
    )
    yield "setup", {"LICENSE": MIT, "setup.cfg": "[metadata]\nlicense = GPL-3.0-or-later\n", "bad.py": ""}
    yield (
        "classifier",
        {
            "LICENSE": MIT,
            "PKG-INFO": "License: MIT\nClassifier: License :: OSI Approved :: GNU General Public License (GPL)\n",
            "bad.py": "",
        },
    )
    yield "poetry", {"pyproject.toml": '[tool.poetry]\nlicense = "MIT"\n', "good.py": ""}
    yield "cargo", {"Cargo.toml": '[package]\nlicense = "MIT/GPL-2.0"\n', "good.py": ""}


def test_a_repository_is_under_what_its_files_and_metadata_say_together(tmp_path: Path) -> None:
    number = 0
    wanted: set[str] = set()
    for name, tree in repositories():
        for path, text in tree.items():
            number += 1
            target = tmp_path / "all" / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text + (source(number) if path.endswith(("bad.py", "good.py")) else ""))
            wanted |= {f"{name}/{path}"} if path.endswith("good.py") else set()
    kept, _, _ = made(tmp_path, ["all"], secrets=False)
    assert set(kept) == wanted


def test_passing_over_templates_changes_no_answer() -> None:
    """Against the library alone, which tries each."""
    from spdx_matcher import analyse_license_text

    templates = Templates()
    bsd = MIT.replace("MIT License", "").replace("Permission is hereby granted", "Redistribution is permitted")
    for text in (MIT, " ".join(MIT.split()), bsd, COPYLEFT, f"{MIT}\n\n{MIT}", "words"):
        assert templates.named(text) == sorted(analyse_license_text(text)[0]["licenses"]), text


def test_a_text_that_the_templates_do_not_know_is_known_by_itself() -> None:
    licences = Licences(PERMISSIVE)
    for name in ("Unlicense", "BSL-1.0", "MIT", "Zlib", "ISC"):
        whole = licences._templates.text(name)
        assert licences.permits(licences.of_repository({"LICENSE": whole}, "")), name


def test_what_packages_say_of_themselves() -> None:
    for path, text, said in (
        ("PKG-INFO", "License: BSD\nClassifier: License :: OSI Approved :: MIT License\n\nx", ["BSD-3-Clause", "MIT"]),
        ("setup.py", 'setup(license="BSD", classifiers=["License :: OSI Approved"])', ["BSD-3-Clause"]),
        ("pyproject.toml", "[project]\nlicense = {file = 'X'}\nclassifiers = ['License :: X :: ISC']", ["ISC"]),
        ("package.json", '{"license": {"type": "MIT"}}', ["MIT"]),
        ("package.json", "[1]", []),
        ("pyproject.toml", "not toml", []),
        ("setup.cfg", "no section", []),
        ("PKG-INFO", "License: UNKNOWN\n", []),
    ):  # fmt: skip
        assert metadata.statements(path, text) == said, path
