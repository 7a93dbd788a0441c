//! An engine that answers the control routes with recorded bodies, changed as
//! a test wants it. It can be stopped, and started again on its port.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::task::{JoinHandle, JoinSet};

use crate::Port;

macro_rules! recorded {
    ($name:literal) => {
        serde_json::from_slice::<Value>(include_bytes!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/sglang/",
            $name,
            ".response.json"
        )))
        .unwrap()
    };
}

/// What the engine says.
pub struct Says {
    pub ready: u16,
    /// `None`: no answer.
    pub health: Option<u16>,
    /// Nothing is answered at all.
    pub hung: bool,
    pub server_info: Value,
    pub model_info: Value,
    pub models: Value,
    pub loads: Value,
    /// Ranks whose timestamp stands still.
    pub frozen: Vec<usize>,
    clock: f64,
    /// Paths that were asked for.
    pub asked: Vec<String>,
}

pub struct FakeEngine {
    port: Port,
    says: Arc<Mutex<Says>>,
    serving: Option<JoinHandle<()>>,
    connections: Arc<Mutex<JoinSet<()>>>,
}

impl FakeEngine {
    /// Two ranks, ready.
    pub async fn start() -> Self {
        let says = Says {
            ready: 200,
            health: Some(200),
            hung: false,
            server_info: recorded!("dp_server_info"),
            model_info: recorded!("model_info"),
            models: recorded!("v1_models"),
            loads: recorded!("dp_loads"),
            frozen: Vec::new(),
            clock: 1.8e9,
            asked: Vec::new(),
        };
        let mut engine = Self {
            port: Port::reserve(),
            says: Arc::new(Mutex::new(says)),
            serving: None,
            connections: Arc::default(),
        };
        engine.listen().await;
        engine
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    pub fn say<T>(&self, change: impl FnOnce(&mut Says) -> T) -> T {
        change(&mut self.says.lock().unwrap())
    }

    pub async fn listen(&mut self) {
        let listener = self.port.listen().await;
        let says = Arc::clone(&self.says);
        let connections = Arc::clone(&self.connections);
        self.serving = Some(tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let says = Arc::clone(&says);
                connections.lock().unwrap().spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&says), request));
                    let _ = http1::Builder::new()
                        .serve_connection(TokioIo::new(socket), service)
                        .await;
                });
            }
        }));
    }

    /// Its connections are closed; its port never refuses.
    pub fn drop_connections(&self) {
        self.connections.lock().unwrap().abort_all();
    }

    /// The process is gone: its port refuses, its connections are closed.
    pub async fn stop(&mut self) {
        self.drop_connections();
        if let Some(serving) = self.serving.take() {
            serving.abort();
            let _ = serving.await;
        }
    }

    /// The process starts anew, as another start.
    pub async fn restart(&mut self) {
        self.stop().await;
        self.say(|says| {
            let took = &mut says.server_info["startup_time"]["tokenizer_e2e"];
            *took = Value::from(took.as_f64().unwrap() + 0.001);
        });
        self.listen().await;
    }
}

impl Drop for FakeEngine {
    fn drop(&mut self) {
        if let Some(serving) = &self.serving {
            serving.abort();
        }
    }
}

async fn answer(
    says: Arc<Mutex<Says>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, body) = {
        let mut says = says.lock().unwrap();
        let path = request.uri().to_string();
        says.asked.push(path.clone());
        if says.hung {
            (None, Value::Null)
        } else {
            match path.as_str() {
                "/ready" => (Some(says.ready), Value::Null),
                "/health" => (says.health, Value::Null),
                "/server_info" => (Some(200), says.server_info.clone()),
                "/model_info" => (Some(200), says.model_info.clone()),
                "/v1/models" => (Some(200), says.models.clone()),
                "/v1/loads?include=core" => {
                    says.clock += 0.5;
                    let (clock, frozen) = (says.clock, says.frozen.clone());
                    let ranks = says.loads["loads"].as_array_mut().unwrap();
                    for (number, rank) in ranks.iter_mut().enumerate() {
                        if !frozen.contains(&number) {
                            rank["timestamp"] = clock.into();
                        }
                    }
                    (Some(200), says.loads.clone())
                }
                _ => (Some(404), Value::Null),
            }
        }
    };
    let Some(status) = status else {
        tokio::time::sleep(Duration::from_secs(3600)).await;
        return Ok(Response::new(Full::default()));
    };
    let mut response = Response::new(Full::from(body.to_string()));
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap();
    Ok(response)
}
