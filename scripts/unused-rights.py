#!/usr/bin/env python3
"""Lists the access rights of the controller that it never used, from the audit log of a test cluster.

    scripts/unused-rights.py AUDIT_LOG ROLES_JSON

ROLES_JSON is the output of `kubectl get clusterroles,roles -A -l app.kubernetes.io/name=evenkeel-controller -o json`.
Exits with 1 if there are unused rights beyond EXPECTED.
"""

import itertools
import json
import sys

# Never requested, with the reason why they are granted.
EXPECTED = {
    ("evenkeel.dev", "trainingjobs/finalizers", "update"): "the admission of owner references asks for it",
    ("evenkeel.dev", "trainingjobs", "get"): "only an account that has it may grant it to the pods",
}
COMPANIONS = {
    "": ["serviceaccounts", "services"],
    "networking.k8s.io": ["networkpolicies"],
    "rbac.authorization.k8s.io": ["rolebindings", "roles"],
}
for group, companions in COMPANIONS.items():
    for companion in companions:
        reason = "updates the object of an older controller (unit tests of operator/ownership.rs)"
        EXPECTED[group, companion, "patch"] = reason


def granted(roles):
    for role in json.load(roles)["items"]:
        for rule in role["rules"]:
            yield from itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])


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
        # Core resources have no group.
        yield target.get("apiGroup", ""), resource, event["verb"]


def main():
    audit_log, roles_json = sys.argv[1:]
    with open(roles_json) as roles:
        rights = set(granted(roles))
    with open(audit_log) as log:
        seen = set(used(log))
    unused = rights - seen
    for right in sorted(unused):
        group, resource, verb = right
        reason = EXPECTED.get(right, "UNEXPECTED: remove it from charts/evenkeel/rules/, or test its use")
        name = f"{resource}.{group}" if group else resource
        print(f"never used: {verb} {name}: {reason}")
    print(f"{len(rights)} rights granted, {len(rights & seen)} used")
    sys.exit(bool(unused - EXPECTED.keys()))


if __name__ == "__main__":
    main()
