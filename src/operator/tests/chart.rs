//! The chart as `manifests/base` renders it: what its policy lets a `podTemplate` set, and how the controller runs.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

/// The objects that the chart renders with its default values.
fn objects() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/base/controller.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let objects = text.split("\n---\n");
    objects
        .map(|object| serde_saphyr::from_str(object).unwrap())
        .collect()
}

/// The objects of a kind.
fn of_kind(kind: &str) -> Vec<Value> {
    let mut objects = objects();
    objects.retain(|object| object["kind"] == kind);
    objects
}

/// The chart's ValidatingAdmissionPolicy, evaluated as by an API server: an expression that fails refuses.
struct Policy {
    spec: Value,
    env: Arc<cel::Env>,
}

impl Policy {
    fn of_chart() -> Policy {
        let mut policies = of_kind("ValidatingAdmissionPolicy");
        assert_eq!(policies.len(), 1);
        Policy {
            spec: policies.remove(0)["spec"].take(),
            env: Arc::new(cel::Env::stdlib()),
        }
    }

    fn list(&self, part: &str) -> &[Value] {
        self.spec[part].as_array().unwrap()
    }

    /// The value of an expression, `None` if it fails.
    fn evaluate(&self, expression: &Value, variables: &Value) -> Option<Value> {
        let expression = expression["expression"].as_str().unwrap();
        let program = self.env.compile(expression);
        let program = program.unwrap_or_else(|error| panic!("{expression}: {error}"));
        let mut context = cel::Context::with_env(self.env.clone());
        for (name, value) in variables.as_object().unwrap() {
            context.add_variable(name.as_str(), value).unwrap();
        }
        program.execute(&context).ok()?.json().ok()
    }

    /// Whether the policy judges a request.
    fn applies_to(&self, operation: &str, object: &Value, old: &Value) -> bool {
        let request =
            json!({"request": {"operation": operation}, "object": object, "oldObject": old});
        let mut conditions = self.list("matchConditions").iter();
        conditions.all(|condition| self.evaluate(condition, &request) == Some(true.into()))
    }

    /// The messages, up to the way out, with which it refuses a `podTemplate`.
    fn refusals(&self, template: &Value) -> Vec<&str> {
        let object = json!({"spec": {"podTemplate": template}});
        let mut known = json!({"object": object, "variables": {}});
        for variable in self.list("variables") {
            // An API server evaluates a variable when an expression uses it.
            if let Some(value) = self.evaluate(variable, &known) {
                known["variables"][variable["name"].as_str().unwrap()] = value;
            }
        }
        let validations = self.list("validations").iter();
        let refused =
            validations.filter(|validation| self.evaluate(validation, &known) != Some(true.into()));
        refused.map(message).collect()
    }
}

fn message(validation: &Value) -> &str {
    let message = validation["message"].as_str().unwrap();
    let message = message.strip_prefix("spec.podTemplate must not ").unwrap();
    message.split_once(';').unwrap().0
}

/// Templates with a container of each kind that has these fields.
fn containers(fields: &Value) -> Vec<Value> {
    let kinds = ["containers", "initContainers", "ephemeralContainers"];
    let mut container = json!({"name": "trainer"});
    let container = container.as_object_mut().unwrap();
    container.extend(fields.as_object().unwrap().clone());
    // The first container is harmless.
    let template = |kind: &str| json!({"spec": {kind: [{"name": "other"}, container]}});
    kinds.map(template).into()
}

/// Templates with this security context, of the pod and of a container of each kind.
fn contexts(context: &Value) -> Vec<Value> {
    let fields = json!({"securityContext": context});
    let mut templates = containers(&fields);
    templates.push(json!({"spec": fields}));
    templates
}

#[test]
fn the_policy_refuses_what_the_baseline_standard_forbids_wherever_it_is_set() {
    let pod = |spec: Value| vec![json!({"spec": spec})];
    let selinux = "set the SELinux user or role, or the type of another domain";
    let host = "set the host of a probe or hook";
    let cases = [
        (pod(json!({"hostNetwork": true})), "set hostNetwork"),
        (pod(json!({"hostPID": true})), "set hostPID"),
        (pod(json!({"hostIPC": true})), "set hostIPC"),
        (pod(json!({"hostIPC": "true"})), "set hostIPC"),
        (
            [
                json!({"priorityClassName": "system-node-critical"}),
                json!({"priorityClassName": "batch"}),
                json!({"priority": 1000}),
            ]
            .into_iter()
            .flat_map(pod)
            .collect(),
            "set a priority class",
        ),
        (
            contexts(&json!({"windowsOptions": {"hostProcess": true}})),
            "set hostProcess",
        ),
        (
            pod(json!({"volumes": [{"name": "a"}, {"name": "v", "hostPath": {"path": "/"}}]})),
            "mount a hostPath",
        ),
        (
            containers(
                &json!({"ports": [{"containerPort": 1}, {"containerPort": 2, "hostPort": 2}]}),
            ),
            "set a hostPort",
        ),
        (
            contexts(&json!({"privileged": true})),
            "have a privileged container",
        ),
        (
            contexts(&json!({"capabilities": {"add": ["IPC_LOCK", "SYS_ADMIN"]}})),
            "add capabilities other than IPC_LOCK",
        ),
        (contexts(&json!({"procMount": "Unmasked"})), "set procMount"),
        (
            contexts(&json!({"seccompProfile": {"type": "Unconfined"}})),
            "disable seccomp",
        ),
        (
            contexts(&json!({"appArmorProfile": {"type": "Unconfined"}})),
            "disable AppArmor",
        ),
        (
            vec![json!({"metadata": {"annotations": {
                "container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}}})],
            "disable AppArmor",
        ),
        (
            contexts(&json!({"seLinuxOptions": {"type": "spc_t"}})),
            selinux,
        ),
        (
            contexts(&json!({"seLinuxOptions": {"user": "system_u"}})),
            selinux,
        ),
        (
            contexts(&json!({"seLinuxOptions": {"role": "system_r"}})),
            selinux,
        ),
        (
            pod(json!({"securityContext": {"sysctls": [
                {"name": "net.ipv4.tcp_syncookies", "value": "1"}, {"name": "kernel.msgmax", "value": "1"}]}})),
            "set an unsafe sysctl",
        ),
        (
            containers(&json!({"livenessProbe": {"httpGet": {"port": 1, "host": "10.0.0.1"}}})),
            host,
        ),
        (
            containers(&json!({"readinessProbe": {"tcpSocket": {"port": 1, "host": "10.0.0.1"}}})),
            host,
        ),
        (
            containers(&json!({"startupProbe": {"tcpSocket": {"port": 1, "host": "10.0.0.1"}}})),
            host,
        ),
        (
            containers(
                &json!({"lifecycle": {"postStart": {"httpGet": {"port": 1, "host": "10.0.0.1"}}}}),
            ),
            host,
        ),
        (
            containers(
                &json!({"lifecycle": {"preStop": {"tcpSocket": {"port": 1, "host": "10.0.0.1"}}}}),
            ),
            host,
        ),
    ];
    let policy = Policy::of_chart();
    let mut refused = BTreeSet::new();
    for (templates, expected) in cases {
        refused.insert(expected);
        for template in templates {
            assert_eq!(policy.refusals(&template), [expected], "{template}");
        }
    }
    let all: BTreeSet<&str> = policy.list("validations").iter().map(message).collect();
    assert_eq!(refused, all, "each validation has a case");
}

#[test]
fn the_policy_allows_what_the_baseline_standard_allows() {
    let mut templates = vec![
        json!({}),
        json!({"metadata": {"labels": {"a": "b"}, "annotations": {
            "container.apparmor.security.beta.kubernetes.io/trainer": "runtime/default"}}}),
        json!({"spec": {
            "hostNetwork": false, "nodeSelector": {"pool": "a"}, "tolerations": [{"operator": "Exists"}],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "n", "nfs": {"server": "s", "path": "/"}}],
            "securityContext": {"sysctls": [{"name": "net.ipv4.tcp_keepalive_time", "value": "60"}]},
        }}),
    ];
    let probe = json!({"httpGet": {"port": 1, "path": "/"}});
    templates.extend(containers(&json!({
        "ports": [{"containerPort": 1}], "livenessProbe": probe, "readinessProbe": {"exec": {"command": ["true"]}},
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
    })));
    for context in [
        json!({}),
        json!({"runAsUser": 0, "allowPrivilegeEscalation": true}),
        json!({"windowsOptions": {"hostProcess": false}, "privileged": false, "procMount": "Default"}),
        json!({"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}}),
        json!({"seccompProfile": {"type": "RuntimeDefault"}, "appArmorProfile": {"type": "RuntimeDefault"}}),
        json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "p"}}),
        json!({"seLinuxOptions": {"type": "container_t", "level": "s0:c1,c2"}}),
    ] {
        templates.extend(contexts(&context));
    }
    let policy = Policy::of_chart();
    for template in templates {
        assert_eq!(policy.refusals(&template), [""; 0], "{template}");
    }
}

#[test]
fn the_policy_judges_new_and_changed_specs() {
    let policy = Policy::of_chart();
    let job =
        |phase: &str, nodes: u32| json!({"spec": {"nodes": nodes}, "status": {"phase": phase}});
    let old = job("Running", 1);
    assert!(policy.applies_to("CREATE", &old, &Value::Null));
    assert!(policy.applies_to("UPDATE", &job("Running", 2), &old));
    assert!(!policy.applies_to("UPDATE", &job("Failed", 1), &old));
}

#[test]
fn names_outside_the_controllers_namespace_contain_it() {
    let mut outside = Vec::new();
    for object in objects() {
        let metadata = &object["metadata"];
        if metadata["namespace"] != "evenkeel-system" {
            let name = metadata["name"].as_str().unwrap();
            assert_eq!(name, "evenkeel.evenkeel-system", "{object}");
            outside.push(object["kind"].as_str().unwrap().to_owned());
        }
    }
    outside.sort();
    let expected = [
        "ClusterRole",
        "ClusterRoleBinding",
        "Role",
        "RoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    ];
    assert_eq!(outside, expected);
}

#[test]
fn the_controller_reads_no_leases_but_those_of_its_replicas_and_of_nodes() {
    let roles = of_kind("ClusterRole").into_iter().chain(of_kind("Role"));
    let mut rights = Vec::new();
    for role in roles {
        for rule in role["rules"].as_array().unwrap() {
            if rule["resources"] == json!(["leases"]) {
                let namespace = role["metadata"]["namespace"].clone();
                rights.push((namespace, rule["verbs"].clone()));
            }
        }
    }
    let expected = [
        ("evenkeel-system", vec!["get", "create", "patch"]),
        ("kube-node-lease", vec!["get"]),
    ];
    assert_eq!(
        rights,
        expected.map(|(at, verbs)| (json!(at), json!(verbs)))
    );
    // Each role is bound to the controller's account.
    for binding in of_kind("RoleBinding")
        .iter()
        .chain(&of_kind("ClusterRoleBinding"))
    {
        assert_eq!(binding["roleRef"]["name"], binding["metadata"]["name"]);
        let subject = &binding["subjects"][0];
        assert_eq!(subject["name"], "evenkeel");
        assert_eq!(subject["namespace"], "evenkeel-system");
    }
}

#[test]
fn replicas_survive_the_loss_and_the_drain_of_a_node() {
    let deployment = &of_kind("Deployment")[0]["spec"];
    let template = &deployment["template"];
    assert_eq!(deployment["replicas"], 2);
    // No class of a tenant preempts them, and the quota lets all of them have theirs.
    let class = &template["spec"]["priorityClassName"];
    assert_eq!(class, "system-cluster-critical");
    let quota = &of_kind("ResourceQuota")[0]["spec"];
    assert_eq!(quota["hard"]["pods"], "8");
    assert_eq!(
        quota["scopeSelector"]["matchExpressions"][0]["values"],
        json!([class])
    );
    let labels = &template["metadata"]["labels"];
    let selects = |selector: &Value| selector["matchLabels"] == *labels;
    assert!(selects(&deployment["selector"]));

    let lost = |toleration: &&Value| toleration["effect"] == "NoExecute";
    let tolerations = template["spec"]["tolerations"].as_array().unwrap();
    let lost: Vec<_> = tolerations
        .iter()
        .filter(lost)
        .map(|toleration| (&toleration["key"], &toleration["tolerationSeconds"]))
        .collect();
    let (gone, silent) = (
        json!("node.kubernetes.io/not-ready"),
        json!("node.kubernetes.io/unreachable"),
    );
    assert_eq!(lost, [(&gone, &json!(20)), (&silent, &json!(20))]);

    let spread = &template["spec"]["topologySpreadConstraints"][0];
    assert_eq!(spread["topologyKey"], "kubernetes.io/hostname");
    assert_eq!(spread["whenUnsatisfiable"], "DoNotSchedule");
    assert!(selects(&spread["labelSelector"]));

    let budget = &of_kind("PodDisruptionBudget")[0];
    assert_eq!(budget["metadata"]["namespace"], "evenkeel-system");
    assert_eq!(budget["spec"]["maxUnavailable"], 1);
    assert!(selects(&budget["spec"]["selector"]));
    assert!(selects(&of_kind("NetworkPolicy")[0]["spec"]["podSelector"]));
}
