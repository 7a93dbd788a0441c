//! The commands as an operator uses them: processes, files and signals.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};

use berth::engine::sim::{SimConfig, SimEngine};

use crate::world::eventually;

/// Without our own variables: they would change what is tested.
fn berth() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BERTH_")) {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

/// Killed when it is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A control plane in a process of its own, and the files of its callers.
struct Plane {
    dir: tempfile::TempDir,
    process: Process,
    grpc: String,
    admin: SocketAddr,
}

/// Makes a token in `DIR/NAME` and gives its line.
fn token(dir: &Path, name: &str, role: &str) -> String {
    let made = berth()
        .args(["token", "--principal", name, "--role", role])
        .args(["--tenant", "a", "--out"])
        .arg(dir.join(name))
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap()
}

impl Plane {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lines = [
            token(dir.path(), "ops", "admin"),
            token(dir.path(), "sidecar", "replica"),
            token(dir.path(), "bench", "sample,admin"),
        ];
        std::fs::write(dir.path().join("credentials"), lines.concat()).unwrap();
        let log = File::create(dir.path().join("log")).unwrap();
        let serve = berth()
            .args([
                "serve",
                "--listen",
                "127.0.0.1:0",
                "--admin-listen",
                "127.0.0.1:0",
            ])
            .args(["--log-format", "json", "--log", "trace", "--data-dir"])
            .arg(dir.path().join("store"))
            .arg("--credentials")
            .arg(dir.path().join("credentials"))
            .arg("--audit-log")
            .arg(dir.path().join("audit"))
            .stderr(log)
            .spawn()
            .unwrap();
        let process = Process(serve);
        let mut listening = None;
        eventually("it listens", async || {
            let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
            let line = log.lines().find(|line| line.contains("\"listening\""));
            listening = line.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
            listening.is_some()
        })
        .await;
        let listening = listening.unwrap();
        Self {
            grpc: format!("http://{}", listening["grpc"].as_str().unwrap()),
            admin: listening["admin"].as_str().unwrap().parse().unwrap(),
            process,
            dir,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// A command with the token of this file.
    fn run(&self, who: &str, args: &[&str]) -> (Option<i32>, String) {
        let Output {
            status,
            stdout,
            stderr,
        } = berth()
            .args(args)
            .env("BERTH_TOKEN_FILE", self.path(who))
            .output()
            .unwrap();
        let text = String::from_utf8([stdout, stderr].concat()).unwrap();
        (status.code(), text)
    }

    /// An operator's command.
    fn ops(&self, args: &[&str]) -> (Option<i32>, String) {
        self.run("ops", &[args, &["--url", &self.grpc]].concat())
    }

    /// What the admin port answers.
    fn http(&self, path: &str, token: Option<&str>) -> String {
        let mut stream = std::net::TcpStream::connect(self.admin).unwrap();
        let token = token.map(|token| format!("authorization: Bearer {token}\r\n"));
        let request = format!(
            "GET {path} HTTP/1.1\r\nhost: berth\r\nconnection: close\r\n{}\r\n",
            token.unwrap_or_default()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_command_calls_with_the_token_of_a_file_and_no_log_has_it() {
    let plane = Plane::start().await;
    let engine = SimEngine::start(SimConfig {
        incremental_streaming_output: true,
        ..SimConfig::instant()
    })
    .await
    .unwrap();
    let sidecar_log = File::create(plane.path("sidecar-log")).unwrap();
    let _sidecar = Process(
        berth()
            .args([
                "sidecar",
                "--control-plane",
                &plane.grpc,
                "--replica-id",
                "r",
            ])
            .args([
                "--engine-url",
                &engine.url(),
                "--log",
                "trace",
                "--token-file",
            ])
            .arg(plane.path("sidecar"))
            .stderr(sidecar_log)
            .spawn()
            .unwrap(),
    );
    eventually("it is registered", async || {
        let (code, text) = plane.ops(&["replicas"]);
        code == Some(0) && text.contains("healthy")
    })
    .await;
    let bench = [
        "bench",
        "affinity",
        "--control-plane",
        &plane.grpc,
        "--trajectories",
        "1",
        "--turns",
        "2",
        "--initial-prompt-tokens",
        "64",
        "--output-tokens",
        "4",
        "--replicas",
        "1",
    ];
    let (code, text) = plane.run("bench", &bench);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = plane.ops(&["explain"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = plane.ops(&["purge", "--tenant", "a"]);
    assert!(code == Some(0) && text.contains("removed 4 keys"), "{text}");
    let (code, text) = plane.ops(&["purge", "--tenant", "a"]);
    assert!(
        code == Some(3) && text.contains("TENANT_NOT_FOUND"),
        "{text}"
    );

    // Those who are not known, or may not.
    let no_token = berth()
        .args(["replicas", "--url", &plane.grpc])
        .output()
        .unwrap();
    let text = String::from_utf8(no_token.stderr).unwrap();
    assert_eq!(no_token.status.code(), Some(1));
    assert!(
        text.contains("NO_CREDENTIALS") && text.contains("--token-file"),
        "{text}"
    );
    let (code, text) = plane.run("sidecar", &["replicas", "--url", &plane.grpc]);
    assert!(code == Some(1) && text.contains("ROLE_MISSING"), "{text}");

    // The admin port.
    let ops = plane.read("ops").trim().to_owned();
    assert!(plane.http("/readyz", None).starts_with("HTTP/1.1 200"));
    let refused = plane.http("/metrics", None);
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");
    let wrong = plane.http("/metrics", Some(plane.read("sidecar").trim()));
    assert!(wrong.starts_with("HTTP/1.1 403"), "{wrong}");
    let let_in = plane.http("/metrics", Some(&ops));
    assert!(
        !let_in.starts_with("HTTP/1.1 4") || let_in.starts_with("HTTP/1.1 404"),
        "{let_in}"
    );

    // Every token was used, and none is anywhere but in its own file.
    for name in ["ops", "sidecar", "bench"] {
        let token = plane.read(name);
        let secret = token.trim().strip_prefix("berth_").unwrap();
        for log in ["log", "sidecar-log", "audit", "credentials"] {
            let at = plane.read(log).find(secret);
            assert_eq!(at, None, "the token of {name} is in {log}");
        }
    }
    engine.stop().await;
}

#[tokio::test]
async fn a_hangup_reads_files_again_and_begins_the_audit_log_anew() {
    let plane = Plane::start().await;
    let fresh = token(plane.dir.path(), "later", "admin");
    let mut credentials = plane.read("credentials");
    credentials.push_str(&fresh);
    std::fs::write(plane.path("credentials"), credentials).unwrap();
    std::fs::rename(plane.path("audit"), plane.path("audit.1")).unwrap();
    let pid = plane.process.0.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-HUP", &pid])
            .status()
            .unwrap()
            .success()
    );
    eventually("the audit log is begun anew", async || {
        plane.path("audit").exists()
    })
    .await;
    eventually("the new token counts", async || {
        let (code, _) = plane.run("later", &["replicas", "--url", &plane.grpc]);
        code == Some(0)
    })
    .await;
    let (code, _) = plane.ops(&["drain", "nobody"]);
    assert_eq!(code, Some(3));
    let audit = plane.read("audit");
    assert!(
        audit.contains("\"drain\"") && audit.contains("REPLICA_NOT_FOUND"),
        "{audit}"
    );
}

#[test]
fn a_token_is_written_to_a_file_of_its_own_or_read_and_never_shown() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let line = token(dir.path(), "t", "sample");
    let text = std::fs::read_to_string(dir.path().join("t")).unwrap();
    let mode = std::fs::metadata(dir.path().join("t"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(!line.contains(text.trim()));
    // Never over another one.
    let again = berth()
        .args(["token", "--principal", "t", "--role", "admin", "--out"])
        .arg(dir.path().join("t"))
        .output()
        .unwrap();
    assert!(!again.status.success());
    assert_eq!(std::fs::read_to_string(dir.path().join("t")).unwrap(), text);
    // A token that is made elsewhere.
    let read = |token: &str| {
        let mut child = berth()
            .args([
                "token",
                "--principal",
                "t",
                "--role",
                "sample",
                "--tenant",
                "a",
            ])
            .arg("--from-stdin")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(token.as_bytes())
            .unwrap();
        child.wait_with_output().unwrap()
    };
    assert_eq!(String::from_utf8(read(&text).stdout).unwrap(), line);
    let short = read("hunter2\n");
    assert!(!short.status.success());
    let told = String::from_utf8(short.stderr).unwrap();
    assert!(
        told.contains("less than 32") && !told.contains("hunter2"),
        "{told}"
    );
}
