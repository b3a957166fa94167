"""Every numeric case of `tests/cases/*.yaml` is one test, `test_case[<id>]`.

Each area has a module `tests/case_checks/<area>.py` with a table `CHECKS: {id: function(case)}`. A case without a
check, and a check without a case, both fail here, so that none is lost in silence.
"""

import importlib
import pathlib

import pytest
import yaml

FOLDER = pathlib.Path(__file__).parent / "cases"
CASES = {
    case["id"]: (document["area"], case)
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in [yaml.safe_load(path.read_text())]
    for case in document["cases"]
}


@pytest.mark.parametrize("case_id", CASES)
def test_case(case_id):
    area, case = CASES[case_id]
    checks = importlib.import_module(f"tests.case_checks.{area}").CHECKS
    assert case_id in checks, f"tests/case_checks/{area}.py has no check for {case_id}"
    checks[case_id](case)


def test_every_check_has_its_case():
    for area in sorted({area for area, _ in CASES.values()}):
        checks = importlib.import_module(f"tests.case_checks.{area}").CHECKS
        unknown = set(checks) - {case_id for case_id, (its_area, _) in CASES.items() if its_area == area}
        assert not unknown, f"checks without a case: {sorted(unknown)}"
