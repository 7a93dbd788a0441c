//! What stands before a simulated engine: it passes everything on, notes the trace
//! context of what is to be generated, and answers in the engine's place with
//! what the request said, where a test wants that.

use std::sync::{Arc, Mutex};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use berth::engine::http::HttpClient;
use http::Method;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

/// How it answers what is to be generated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Manner {
    /// As the engine does.
    #[default]
    Passes,
    /// A text, the request's own, ended by its first stop.
    AnswersText,
    /// 400, with the request in the message.
    RefusesWithEcho,
    /// 500, with the request in the message.
    FailsWithEcho,
    /// A stream whose first event is the request.
    StreamsEcho,
    /// A stream that begins well and goes on with the request in a field where a
    /// number belongs.
    StreamsNonsense,
}

pub struct Front {
    url: String,
    shared: Arc<Shared>,
    _stop: DropGuard,
}

struct Shared {
    engine: String,
    manner: Mutex<Manner>,
    contexts: Mutex<Vec<Option<String>>>,
    http: HttpClient,
}

impl Front {
    pub async fn start(engine: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Shared {
            engine,
            manner: Mutex::default(),
            contexts: Mutex::default(),
            http: HttpClient::default(),
        });
        let stop = CancellationToken::new();
        let app = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&shared));
        let served = async move { axum::serve(listener, app).await };
        tokio::spawn(stop.clone().run_until_cancelled_owned(served));
        Self {
            url,
            shared,
            _stop: stop.drop_guard(),
        }
    }

    pub fn url(&self) -> String {
        self.url.clone()
    }

    pub fn set(&self, manner: Manner) {
        *self.shared.manner.lock().unwrap() = manner;
    }

    /// `traceparent` of each request to generate, in order.
    pub fn contexts(&self) -> Vec<Option<String>> {
        self.shared.contexts.lock().unwrap().clone()
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if uri.path() == "/generate" {
        let context = headers.get("traceparent");
        let context = context.map(|c| c.to_str().unwrap().to_owned());
        shared.contexts.lock().unwrap().push(context);
        let manner = *shared.manner.lock().unwrap();
        if let Some(answer) = echo(manner, &body) {
            return answer;
        }
    }
    let path = uri.path_and_query().unwrap().as_str();
    let json = (method != Method::GET).then_some(body);
    let passed = shared
        .http
        .send(method, &shared.engine, path, HeaderMap::new(), json)
        .await;
    let Ok(reply) = passed else {
        return StatusCode::BAD_GATEWAY.into_response();
    };
    let kind = reply.headers.get(header::CONTENT_TYPE).cloned();
    if path == "/server_info" {
        let body = reply.body.collect(1 << 20).await.unwrap();
        let mut info: serde_json::Value = serde_json::from_slice(&body).unwrap();
        // So that texts and stops are sent to it: see `AnswersText`.
        info["skip_tokenizer_init"] = false.into();
        return axum::Json(info).into_response();
    }
    let pieces = futures_util::stream::try_unfold(reply.body, async |mut body| {
        let piece = body.next().await.map_err(std::io::Error::other)?;
        Ok::<_, std::io::Error>(piece.map(|piece| (piece, body)))
    });
    let mut answer = Response::new(Body::from_stream(Box::pin(pieces)));
    *answer.status_mut() = reply.status;
    if let Some(kind) = kind {
        answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    answer
}

fn echo(manner: Manner, body: &[u8]) -> Option<Response> {
    let said = String::from_utf8_lossy(body).into_owned();
    let message = serde_json::json!({ "error": { "message": said } }).to_string();
    let event = |data: String| {
        let kind = [(header::CONTENT_TYPE, "text/event-stream")];
        (kind, format!("data: {data}\n\ndata: [DONE]\n\n")).into_response()
    };
    Some(match manner {
        Manner::Passes => return None,
        Manner::AnswersText => {
            let request: serde_json::Value = serde_json::from_slice(body).unwrap();
            let stop = &request["sampling_params"]["stop"][0];
            event(
                serde_json::json!({
                    "text": request["text"],
                    "output_ids": [5, 6],
                    "meta_info": {
                        "id": request["rid"],
                        "finish_reason": { "type": "stop", "matched": stop },
                        "prompt_tokens": 7,
                        "completion_tokens": 2,
                        "cached_tokens": 0,
                        "weight_version": "default",
                        "weight_versions": [{ "version": "default", "start": 0, "end": 2 }],
                        "dp_rank": null,
                    },
                })
                .to_string(),
            )
        }
        Manner::RefusesWithEcho => (StatusCode::BAD_REQUEST, message).into_response(),
        Manner::FailsWithEcho => (StatusCode::INTERNAL_SERVER_ERROR, message).into_response(),
        Manner::StreamsEcho => event(message),
        Manner::StreamsNonsense => {
            event(serde_json::json!({ "output_ids": said, "meta_info": said }).to_string())
        }
    })
}
