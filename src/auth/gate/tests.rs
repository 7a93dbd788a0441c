//! Who is let in, and to what.

use super::*;

struct Bench {
    gate: Gate,
    dir: tempfile::TempDir,
}

const SAMPLE: &str = "/berth.v1.SamplingService/Sample";
const BEAT: &str = "/berth.v1.ReplicaService/Heartbeat";
const DRAIN: &str = "/berth.v1.FleetService/DrainReplica";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
const REFLECT: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

fn bench(lines: &str, reflection: Reflection) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("credentials");
    std::fs::write(&path, lines).unwrap();
    let known = Known::read(&path).unwrap();
    let audit = Audit::open(Some(&dir.path().join("audit"))).unwrap();
    Bench {
        gate: Gate::new(Some(known), reflection, audit),
        dir,
    }
}

impl Bench {
    fn call(&self, path: &str, authorization: &[&str]) -> Result<Caller, Reason> {
        let mut headers = HeaderMap::new();
        for value in authorization {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        let admitted = self.gate.admit(path, &headers, &http::Extensions::new());
        admitted.map_err(|error| error.reason)
    }

    fn with(&self, path: &str, token: &Token) -> Result<Caller, Reason> {
        self.call(path, &[&format!("Bearer {}", token.expose())])
    }

    fn audited(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("audit")).unwrap()
    }
}

fn token() -> Token {
    Token::mint().unwrap()
}

#[test]
fn a_role_does_what_is_its_own() {
    let (trainer, sidecar, ops, both) = (token(), token(), token(), token());
    let lines = format!(
        "principal=t role=sample tenant=a sha256={}\n\
         principal=s role=replica sha256={}\n\
         principal=o role=admin sha256={}\n\
         principal=b role=sample,admin tenant=b sha256={}\n",
        trainer.hash(),
        sidecar.hash(),
        ops.hash(),
        both.hash()
    );
    let bench = bench(&lines, Reflection::Admin);
    let may = |token: &Token| {
        [SAMPLE, BEAT, DRAIN, REFLECT].map(|path| match bench.with(path, token) {
            Ok(_) => true,
            Err(reason) => {
                assert_eq!(reason, Reason::RoleMissing);
                false
            }
        })
    };
    assert_eq!(may(&trainer), [true, false, false, false]);
    assert_eq!(may(&sidecar), [false, true, false, false]);
    assert_eq!(may(&ops), [false, false, true, true]);
    assert_eq!(may(&both), [true, false, true, true]);
    let caller = bench.with(SAMPLE, &both).unwrap();
    assert_eq!((&*caller.principal, caller.tenant.as_str()), ("b", "b"));
    let audited = bench.audited();
    assert!(audited.contains("\"ROLE_MISSING\"") && audited.contains("\"principal\":\"s\""));
    assert!(!audited.contains(trainer.expose()) && !audited.contains(sidecar.expose()));
}

#[test]
fn who_is_not_known_may_ask_for_health_only() {
    let known = token();
    let lines = format!("principal=s role=sample tenant=a sha256={}\n", known.hash());
    let bench = bench(&lines, Reflection::On);
    assert!(bench.call(HEALTH, &[]).is_ok());
    assert!(bench.call(HEALTH, &["nonsense"]).is_ok());
    for path in [SAMPLE, BEAT, DRAIN, REFLECT] {
        assert_eq!(bench.call(path, &[]).err(), Some(Reason::NoCredentials));
    }
    let good = format!("Bearer {}", known.expose());
    let stranger = format!("Bearer {}", token().expose());
    for wrong in [
        vec!["Bearer short"],
        vec!["Bearer"],
        vec!["Basic dXNlcjpwYXNzd29yZA=="],
        vec![known.expose()],
        vec![&good[..good.len() - 1]],
        vec![&stranger],
        vec![&good, &good],
    ] {
        let refused = bench.call(SAMPLE, &wrong).err();
        assert_eq!(refused, Some(Reason::CredentialsRefused), "{}", wrong.len());
    }
    assert!(
        bench
            .call(SAMPLE, &[&good.replace("Bearer", "bearer")])
            .is_ok()
    );
    assert!(bench.with(REFLECT, &known).is_ok());
    assert!(!bench.audited().contains(&stranger[7..]));
}

#[test]
fn what_is_in_no_table_is_answered_to_nobody() {
    let known = token();
    let lines = format!(
        "principal=o role=sample,replica,admin tenant=a sha256={}\n",
        known.hash()
    );
    let bench = bench(&lines, Reflection::Off);
    for path in ["/berth.v1.FleetService/Later", "/", "", REFLECT] {
        assert_eq!(
            bench.with(path, &known).err(),
            Some(Reason::NotImplemented),
            "{path}"
        );
    }
    let open = Gate::new(None, Reflection::On, Audit::default());
    let admit = |path| open.admit(path, &HeaderMap::new(), &http::Extensions::new());
    assert!(admit("/berth.v1.FleetService/Later").is_err());
    assert!(admit(DRAIN).is_ok());
}

#[test]
fn the_admin_port_answers_probes_and_admins() {
    let (trainer, ops) = (token(), token());
    let lines = format!(
        "principal=t role=sample tenant=a sha256={}\n\
         principal=o role=admin sha256={}\n",
        trainer.hash(),
        ops.hash()
    );
    let bench = bench(&lines, Reflection::On);
    let ask = |path: &str, token: Option<&Token>| {
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            let value = format!("Bearer {}", token.expose()).parse().unwrap();
            headers.insert(header::AUTHORIZATION, value);
        }
        let admitted = bench
            .gate
            .admit_to_admin_port(path, &headers, &http::Extensions::new());
        admitted.err().map(|error| error.reason)
    };
    for probe in ["/livez", "/healthz", "/readyz"] {
        assert_eq!(ask(probe, None), None);
    }
    for path in ["/metrics", "/livez/", "/LIVEZ", "/", ""] {
        assert_eq!(ask(path, None), Some(Reason::NoCredentials), "{path}");
        assert_eq!(ask(path, Some(&trainer)), Some(Reason::RoleMissing));
        assert_eq!(ask(path, Some(&ops)), None);
    }
}

#[test]
fn credentials_count_until_their_time() {
    let (old, new) = (token(), token());
    let lines = format!(
        "principal=s role=sample tenant=a sha256={} not-after=2020-01-01T00:00:00Z\n\
         principal=s role=sample tenant=a sha256={} not-after=2120-01-01T00:00:00Z\n",
        old.hash(),
        new.hash()
    );
    let bench = bench(&lines, Reflection::On);
    assert_eq!(
        bench.with(SAMPLE, &old).err(),
        Some(Reason::CredentialsRefused)
    );
    assert!(bench.with(SAMPLE, &new).is_ok());
}
