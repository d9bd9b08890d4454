{{/* What two values demand of each other: each is one sentence that says what to do. */}}

{{- define "shoal.checks" -}}
{{- $values := .Values -}}
{{- $external := $values.etcd.external -}}
{{- $fullname := include "shoal.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $fullname) -}}
{{- fail (printf "everything would be named %s, but a service's name begins with a letter; set fullnameOverride, or give the release another name" $fullname) -}}
{{- end -}}
{{- if eq $values.store "embedded" -}}
{{- if ne (int $values.controller.replicas) 1 -}}
{{- fail (printf "controller.replicas is %d, but an embedded store can be held by one controller only; set controller.replicas to 1, or store to etcd" (int $values.controller.replicas)) -}}
{{- end -}}
{{- if $external.endpoints -}}
{{- fail "etcd.external.endpoints is given, but store is embedded; set store to etcd, or leave the endpoints out" -}}
{{- end -}}
{{- end -}}
{{- if and $external.user (not $external.passwordSecret) -}}
{{- fail (printf "etcd.external.user is %s, but etcd.external.passwordSecret is empty; name the secret that has the password in its key `password`" $external.user) -}}
{{- end -}}
{{- if and $external.clientCertificate (not $external.tlsSecret) -}}
{{- fail "etcd.external.clientCertificate is true, but etcd.external.tlsSecret is empty; name the secret with ca.crt, tls.crt and tls.key" -}}
{{- end -}}
{{- if not $external.endpoints -}}
{{- range $name := list "user" "passwordSecret" "tlsSecret" -}}
{{- if get $external $name -}}
{{- fail (printf "etcd.external.%s is given, but etcd.external.endpoints is empty; name the members of your etcd, or leave it out" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.tls.source "secret") (not $values.tls.secret) -}}
{{- fail "tls.source is secret, but tls.secret is empty; name the secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if and (ne $values.tls.source "secret") $values.tls.secret -}}
{{- fail (printf "tls.secret is %s, but tls.source is %s; set tls.source to secret, or leave tls.secret out" $values.tls.secret $values.tls.source) -}}
{{- end -}}
{{- if and (eq $values.tls.source "certManager") (not $values.tls.issuer.name) -}}
{{- fail "tls.source is certManager, but tls.issuer.name is empty; name an issuer of cert-manager" -}}
{{- end -}}
{{- if and $values.tls.workers (eq $values.tls.source "none") -}}
{{- fail "tls.workers is true, but tls.source is none; set tls.source to secret, generated or certManager" -}}
{{- end -}}
{{- if and $values.ingress.enabled (not $values.ingress.host) -}}
{{- fail "ingress.enabled is true, but ingress.host is empty; name the host under which REST is to be reached" -}}
{{- end -}}
{{- range $name, $value := $values.controller.env -}}
{{- if hasPrefix "SHOAL_" $name -}}
{{- fail (printf "controller.env.%s is a setting of Shoal, which the chart sets by values of its own; leave it out of controller.env" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
