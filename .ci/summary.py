"""Closing lines of a test run: `summary.py RESULTS_DIR [FAILED_STAGE ...]`, from JUnit files."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def count(path: Path) -> tuple[int, int, int]:
    """Passed, failed, skipped test cases of one file."""
    passed = failed = skipped = 0
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    total = [0, 0, 0]
    for path in sorted(Path(sys.argv[1]).glob("*.xml")):
        counts = count(path)
        total = [a + b for a, b in zip(total, counts, strict=True)]
        print(f"{path.stem}: {counts[0]} passed, {counts[1]} failed, {counts[2]} skipped")
    for stage in sys.argv[2:]:
        print(f"stage {stage} failed")
    print(f"{total[0]} passed, {total[1]} failed, {total[2]} skipped")
    return 1 if sys.argv[2:] or total[1] or not total[0] else 0


sys.exit(main())
