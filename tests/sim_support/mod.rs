//! A bare HTTP client for the simulated engine, and waits on conditions.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Incoming};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;

/// A reply as it came.
#[derive(Debug)]
pub struct Got {
    pub status: u16,
    pub content_type: Option<String>,
    pub body: String,
}

impl Got {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }
}

/// Every call on a connection of its own.
pub async fn open(
    method: &str,
    url: &str,
    headers: &[(String, String)],
    body: &str,
) -> Result<Response<Incoming>, String> {
    let client: Client<HttpConnector, Full<Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let mut request = Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(name, value);
    }
    let request = request.body(Full::from(body.to_owned())).unwrap();
    client.request(request).await.map_err(|e| format!("{e:?}"))
}

/// A whole exchange. An error: there was no reply, or not all of one.
pub async fn call(
    method: &str,
    url: &str,
    headers: &[(String, String)],
    body: &str,
) -> Result<Got, String> {
    let response = open(method, url, headers, body).await?;
    let (head, body) = response.into_parts();
    let body = body.collect().await.map_err(|e| format!("{e:?}"))?;
    let text = |name| {
        let value = head.headers.get(name)?;
        Some(value.to_str().unwrap().to_owned())
    };
    Ok(Got {
        status: head.status.as_u16(),
        content_type: text("content-type"),
        body: String::from_utf8(body.to_bytes().to_vec()).unwrap(),
    })
}

pub async fn get(url: &str, path: &str) -> Result<Got, String> {
    call("GET", &format!("{url}{path}"), &[], "").await
}

pub async fn post(url: &str, path: &str, body: Value) -> Result<Got, String> {
    call("POST", &format!("{url}{path}"), &[], &body.to_string()).await
}

/// Waits until `condition` holds; far longer than it can take on a busy machine.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    within(what, waiting).await;
}

/// Fails where it takes absurdly long.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future)
        .await
        .unwrap_or_else(|_| panic!("{what}: not within a minute"))
}
