"""What an audit says of a release, and of those after it, by the reviewed list and by lists made up here."""

from pathlib import Path

from bundle.environment.packages import InstalledPackages
from bundle.environment.search import build_search_path
from bundle.patches.audit import ENTRIES, Audit, audit
from bundle.patches.entry import Patch, parse_job_features_or_all
from bundle.patches.megatron_core import ReviewTable, load_review_table, resolve_core_path_or_version

ALONE = InstalledPackages(build_search_path([], "", Path("/")))  # no framework


def audited(version: str, features: str = "", table: ReviewTable | None = None) -> Audit:
    table = table or load_review_table()
    return audit(
        resolve_core_path_or_version(version, table),
        table,
        ALONE,
        parse_job_features_or_all(features.split(",")),
    )


def ids(found: Audit) -> set[str]:
    """Everything that is named: what is there, and what later releases have."""
    upgrades = {name for upgrade in found.upgrades for name in (*upgrade.remaining_ids, *upgrade.new_ids)}
    return {defect.entry.id for defect in found.defects} | upgrades


def test_what_is_of_local_layers_alone_or_an_improvement_is_no_defect_of_a_job():
    local = (("cpu",), ("cpu", "ascend"))
    groups = [{e.id for e in ENTRIES if e.backends == backends} for backends in local]
    groups.append({e.id for e in ENTRIES if isinstance(e, Patch) and e.opt_in})
    assert all(groups)
    none = set[str]().union(*groups)
    for version in ("0.12.3", "0.16.1", "0.19.2"):
        assert not none & ids(audited(version))


def test_a_newer_release_is_judged_by_what_is_silent():
    """mtp-zero-layers came in 0.16 and is an error."""
    normalisation = "mtp-loss-context-parallel-normalisation"
    found = audited("0.15.3")
    brought = {name for upgrade in found.upgrades for name in upgrade.new_ids}
    assert normalisation in brought and "mtp-zero-layers" not in brought


def test_what_a_setting_avoids_speaks_against_no_release():
    trap, features = "moe-tensor-without-expert-parallel", "moe,etp-unlike-tp"
    assert trap in ids(audited("0.16.1", features))
    avoided = audited("0.16.1", f"{features},ep")
    assert avoided.upgrades and trap not in ids(avoided)


def test_a_release_that_nobody_read_for_a_defect_is_not_said_to_be_without_it():
    entry, table = "mtp-loss-context-parallel-count", load_review_table()

    def mended_in(absent: str) -> str | None:
        defects = {**table.defects, entry: {"present": "0.16.1", "absent": absent}}
        found = audited("0.16.1", "mtp,cp", table._replace(defects=defects))
        return next(defect.fixing_minor for defect in found.defects if defect.entry.id == entry)

    assert mended_in("0.17.0 0.17.1 0.18.0 0.18.2 0.19.0 0.19.2") == "0.17"
    assert mended_in("0.17.0 0.17.1 0.18.2 0.19.0 0.19.2") == "0.18"  # 0.18.0 was not read for it
    assert mended_in("0.17.0 0.17.1 0.18.0 0.18.2 0.19.0") is None
