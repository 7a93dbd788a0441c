//! A collector of traces that keeps what it is sent.

use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::Span,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status, transport::Server};

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

pub struct Collector {
    pub url: String,
    kept: Kept,
    _stop: DropGuard,
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.lock().unwrap().push(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let kept = Kept::default();
        let stop = CancellationToken::new();
        let serving = Server::builder()
            .add_service(TraceServiceServer::new(kept.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(stop.clone().run_until_cancelled_owned(serving));
        Self {
            url,
            kept,
            _stop: stop.drop_guard(),
        }
    }

    /// All that was received, as it was.
    pub fn received(&self) -> Vec<ExportTraceServiceRequest> {
        self.kept.0.lock().unwrap().clone()
    }

    pub fn spans(&self) -> Vec<Span> {
        let received = self.received().into_iter();
        received
            .flat_map(|request| request.resource_spans)
            .flat_map(|of_resource| of_resource.scope_spans)
            .flat_map(|of_scope| of_scope.spans)
            .collect()
    }
}

/// An attribute as text.
pub fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    Some(shown(found.value.as_ref()?))
}

fn shown(value: &AnyValue) -> String {
    match value.value.as_ref().unwrap() {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        Value::DoubleValue(number) => number.to_string(),
        Value::BoolValue(truth) => truth.to_string(),
        Value::ArrayValue(array) => {
            let values: Vec<_> = array.values.iter().map(shown).collect();
            values.join(",")
        }
        other => format!("{other:?}"),
    }
}
