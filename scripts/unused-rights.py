#!/usr/bin/env python3
"""Lists the access rights of the controller that it never used, from the audit log of a test cluster.

    scripts/unused-rights.py AUDIT_LOG ROLES_JSON

ROLES_JSON is the output of `kubectl get clusterroles,roles -A -l app.kubernetes.io/name=evenkeel-controller -o json`.
Exits with 1 if there are unused rights beyond EXPECTED.
"""

import json
import sys

# Never requested, with the reason why they are granted.
EXPECTED = {
    ("trainingjobs/finalizers", "update"): "the admission of owner references asks for it",
    ("trainingjobs", "get"): "only an account that has it may grant it to the pods",
}
for companion in ["networkpolicies", "rolebindings", "roles", "serviceaccounts", "services"]:
    EXPECTED[companion, "patch"] = "updates the object of an older controller (unit tests of operator/ownership.rs)"


def granted(roles):
    for role in json.load(roles)["items"]:
        for rule in role["rules"]:
            for resource in rule["resources"]:
                yield from ((resource, verb) for verb in rule["verbs"])


def used(log):
    for line in log:
        event = json.loads(line)
        target = event.get("objectRef")
        # An API server that has just started refuses until it has read the roles.
        if not target or event["annotations"].get("authorization.k8s.io/decision") != "allow":
            continue
        resource = target["resource"]
        if target.get("subresource"):
            resource += "/" + target["subresource"]
        yield resource, event["verb"]


def main():
    audit_log, roles_json = sys.argv[1:]
    with open(roles_json) as roles:
        rights = set(granted(roles))
    with open(audit_log) as log:
        seen = set(used(log))
    unused = rights - seen
    for resource, verb in sorted(unused):
        reason = EXPECTED.get((resource, verb), "UNEXPECTED: remove it from charts/evenkeel/rules/, or test its use")
        print(f"never used: {verb} {resource}: {reason}")
    print(f"{len(rights)} rights granted, {len(rights & seen)} used")
    sys.exit(bool(unused - EXPECTED.keys()))


if __name__ == "__main__":
    main()
