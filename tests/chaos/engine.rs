//! A simulated engine as a process that is killed and started again on its port.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use crate::process::{Process, berth};

/// What an engine says of one request that it saw.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) prompt_hash: u64,
    pub(crate) prompt_tokens: u64,
    /// Seconds since 1970.
    pub(crate) arrived: f64,
}

pub(crate) struct Engine {
    pub(crate) url: String,
    port: u16,
    process: Option<Process>,
    /// Bound and never listening: nobody else is given the port while the engine
    /// is down, and to clients it refuses.
    _held: TcpSocket,
}

impl Engine {
    pub(crate) fn start() -> Self {
        let held = TcpSocket::new_v4().unwrap();
        held.set_reuseaddr(true).unwrap();
        held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = held.local_addr().unwrap().port();
        let mut engine = Self {
            url: format!("http://127.0.0.1:{port}"),
            port,
            process: None,
            _held: held,
        };
        engine.again();
        engine
    }

    fn command(&self) -> Command {
        let mut command = berth();
        command
            .args(["sim-engine", "--port", &self.port.to_string()])
            .args(["--time-scale", "0.3", "--incremental-streaming-output"])
            .stdout(Stdio::piped());
        command
    }

    /// Starts it anew. Returns when it was ready.
    pub(crate) fn again(&mut self) -> SystemTime {
        let mut child = self.command().spawn().unwrap();
        let mut said = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        BufReader::new(stdout).read_line(&mut said).unwrap();
        let ready = SystemTime::now();
        assert_eq!(said.trim(), self.url);
        self.process = Some(Process(child));
        ready
    }

    /// As `kill -9` does, until it is gone. Returns when it was told.
    pub(crate) async fn kill(&mut self) -> SystemTime {
        let mut process = self.process.take().unwrap();
        let at = SystemTime::now();
        process.signal("-KILL");
        process.ended().await;
        at
    }

    /// All that it remembers of what it was asked.
    pub(crate) async fn history(&self) -> Vec<Seen> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream
            .write_all(b"GET /sim/history HTTP/1.0\r\nhost: sim\r\n\r\n")
            .await
            .unwrap();
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let read = tokio::time::timeout(Duration::from_secs(20), read);
        read.await.expect("it answers").unwrap();
        let answer = String::from_utf8(answer).unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        let requests = body["entries"].as_array().expect("a list of requests");
        requests
            .iter()
            .map(|r| Seen {
                prompt_hash: u64::from_str_radix(r["prompt_hash"].as_str().unwrap(), 16).unwrap(),
                prompt_tokens: r["prompt_tokens"].as_u64().unwrap(),
                arrived: r["arrived"].as_f64().unwrap(),
            })
            .collect()
    }
}
